"""Windows as pandas takes them, and as readers of 1 to 3 ranks do."""

import numpy as np
import pandas as pd

from scidata.core.options import ReadOptions
from scidata.store.raw_points.windows_reader import points_reader
from tests.windows.tables import kept

MOST = 8  # windows of a table that are read


def starts_of(case):
    """Return the begins of windows, at multiples of ``every`` since 1970."""
    every, epoch = case.every, pd.Timestamp("1970-01-01")
    low, high = ((case.frame.dates.agg(end) - epoch) // every for end in ("min", "max"))
    return [epoch + number * every for number in range(low, high + 1)]


def check_case(rng, case) -> int:
    """Hold all windows of a case against pandas; return how many."""
    if not case.paths:
        return 0
    num_parts = int(rng.integers(1, 4))
    read = ReadOptions(**case.options)
    reader = points_reader(case.paths, read, num_parts=num_parts)
    starts = starts_of(case)
    assert (reader.sample_keys("dates") == np.array(starts, "M8[ns]")).all()
    frame = case.frame.assign(row=np.arange(len(case.frame)))
    frame = frame[kept(frame, read.where)]
    chosen = rng.choice(len(starts), min(MOST, len(starts)), replace=False).tolist()
    for index in chosen:
        start = starts[index]
        wanted = frame[(frame.dates >= start) & (frame.dates < start + case.window)]
        assert reader.counts("point")[index] == len(wanted)
        parts = [reader.read(index, part) for part in range(num_parts)]
        found = {name: np.concatenate([part.fields[name] for part in parts]) for name in reader.fields}
        rows = np.concatenate([reader.original_id(index, part, "point") for part in range(num_parts)])
        assert rows.tolist() == wanted.row.tolist()
        assert np.array_equal(found["pos"], wanted[["lon", "lat"]].to_numpy("f8"))
        assert np.array_equal(found["dates"], (wanted.dates - start) / pd.Timedelta("1s"))
        for name in ("bt", "qc"):
            assert np.array_equal(found[name], wanted[name], equal_nan=True), name
        sizes = [len(part.fields["qc"]) for part in parts]
        assert max(sizes) - min(sizes) <= 1 or read.bounds == "chunk"
        for part, each in enumerate(parts):
            plan = reader.plan(index, part)
            if plan.exact:  # tables of pyarrow say no bytes
                assert plan.bytes_fetched == each.stats.bytes_fetched
        assert [s.rows for s in reader.sources_of(index) if s.rows != (0, 0)] == _ranges(case, wanted.row.to_numpy())
    return len(chosen)


def _ranges(case, rows):
    """Return the first row of a window in each file, and the one after the last."""
    found = []
    for first, stop in zip(case.firsts[:-1], case.firsts[1:], strict=True):
        own = rows[(rows >= first) & (rows < stop)] - first
        if len(own):
            found.append((int(own.min()), int(own.max()) + 1))
    return found
