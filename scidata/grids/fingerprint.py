"""A digest of all that decides the samples of a gridded data set."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from scidata.core.types import Segments, Source
from scidata.grids.steps import FieldSteps


def fingerprint_of(
    files: Sequence[Source],
    fields: Mapping[str, tuple[tuple[int, ...], str]],
    *,
    sample_dims: Sequence[str],
    num_samples: int,
    steps: FieldSteps,
    labels: npt.NDArray[np.generic] | None,
    selected: Mapping[str, Segments],
) -> str:
    """Return a digest of fields, shapes, dtypes, crop, steps, and the labels of the sample dimension.

    Not of where the data lie, so that they may move; nor of their values, which would have to be read. Of sources that
    have revisions (Icechunk) also those, since ranks that open at different times could see different ones.

    Parameters
    ----------
    fields
        Global shape and dtype of each.
    selected
        Rows along each dimension that the crop leaves.
    """
    revisions = [found for source in files if (found := getattr(source, "revision", None)) is not None]
    content: dict[str, object] = {
        "fields": fields,
        "samples": num_samples,
        "steps": steps.as_json(),
        "coordinate": None if labels is None else hashlib.sha256(str(labels.tolist()).encode()).hexdigest(),
        "selected": {dim: [(s.start, s.count, s.step) for s in segments] for dim, segments in selected.items()},
    } | ({"revisions": revisions} if revisions else {})
    if len(sample_dims) > 1:
        content["sample_dims"] = sample_dims
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]
