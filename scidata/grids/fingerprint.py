"""A digest of what decides the samples of a gridded data set."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from scidata.grids.reader import GridReader


def fingerprint_of(reader: GridReader) -> str:
    """Return a digest of what decides the samples: fields, shapes, dtypes, crop, steps, and the sample coordinate.

    Not where they lie, so that data may move; nor their values, which would have to be read. Of sources that have
    revisions (Icechunk) also those, since ranks that open at different times could see different ones.
    """
    series, dim = reader.series, reader.sample_dim
    revisions = [found for source in series.files if (found := getattr(source, "revision", None)) is not None]
    values = None if dim is None else reader.coordinate(dim)
    content: dict[str, Any] = {
        "fields": {n: [reader.global_shape(n), str(reader.dtype(n))] for n in reader.fields},
        "samples": reader.num_samples,
        "steps": reader.field_steps.as_json(),
        "coordinate": None if values is None else hashlib.sha256(str(values.tolist()).encode()).hexdigest(),
        "selected": {
            d: [(s.start, s.count, s.step) for s in segments] for d, segments in reader.partition.selected.items()
        },
    } | ({"revisions": revisions} if revisions else {})
    if len(reader.sample_dims) > 1:
        content["sample_dims"] = reader.sample_dims
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]
