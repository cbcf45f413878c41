"""Times of a stored topology as samples: numbers, steps, crops, figures, and bytes of the times asked for alone."""

from dataclasses import replace

import h5py
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scidata.core.options import ReadOptions
from scidata.errors import ConfigError, FieldMismatchError, UnknownNameError
from scidata.store.partitioning.partition import partition
from scidata.store.reading.reader import StoreReader
from tests.writers import triangulation, write_hdf5

TIMES = (5, 3)
NAMES = {"u": ("time", "lev", "node"), "v": ("node", "time"), "w": ("node", "lev"), "fixed": ("node",)}
CELLS = {"area": ("cell",), "flux": ("time", "cell")}
FIELDS = {"node": NAMES, "cell": CELLS}


def write_raw(path, num_times, num_nodes=300):
    """A triangulation; fields with time before the nodes, behind them, on cells, and without."""
    rng = np.random.default_rng(num_times)
    mesh = triangulation(rng.random((num_nodes, 2)))
    sizes = {"time": num_times, "lev": 4, "node": num_nodes, "cell": len(mesh["cells"])}
    dims = {f"{entity}/{name}": dims for entity, named in FIELDS.items() for name, dims in named.items()}
    fields = {name: rng.standard_normal([sizes[dim] for dim in dims[name]]) for name in dims}
    return write_hdf5(path, mesh | fields, dims)


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    folder = tmp_path_factory.mktemp("times")
    raws = [write_raw(folder / f"case{i}.h5", n) for i, n in enumerate(TIMES[:1])]
    partition(raws, folder / "store")
    return str(folder / "store")


@pytest.fixture(scope="module")
def several(tmp_path_factory):
    """Two stored samples that differ in their number of times; none has time behind the nodes."""
    folder = tmp_path_factory.mktemp("several")
    raws = [write_raw(folder / f"case{i}.h5", n, 300 - 40 * i) for i, n in enumerate(TIMES)]
    partition(raws, folder / "store", fields=["u", "w", "area", "flux"])
    return str(folder / "store")


def whole(reader, stored, name):
    return reader.store.read(stored, reader.info(name).path)


def expected(reader, name, stored, rows, isel):
    """Cut the stored array with NumPy."""
    info = reader.info(name)
    values = whole(reader, stored, name)
    for i, dim in reversed(list(enumerate(info.dims))):  # so that a dim that goes leaves those before it in place
        if dim == "time":
            values = values[(slice(None),) * i + (rows[0] if len(rows) == 1 else rows,)]
        elif dim == "lev":
            values = values[(slice(None),) * i + (isel.get(dim, slice(None)),)]
    return values


@given(data=st.data())
@settings(max_examples=25, deadline=None)
def test_samples_are_what_numpy_cuts_out(several, store, data):
    path = data.draw(st.sampled_from([several, store]))
    steps = data.draw(st.lists(st.integers(-1, 2), min_size=1, max_size=3))
    crop = st.one_of(
        st.integers(-3, 2), st.builds(slice, st.integers(0, 1), st.none(), st.sampled_from([1, 2])),
        st.lists(st.integers(-3, 2), min_size=1, max_size=3, unique=True),
    )  # fmt: skip
    isel = data.draw(st.dictionaries(st.sampled_from(["time", "lev"]), crop, max_size=2))
    plain, numbers = StoreReader(path), []
    for stored in range(len(plain.store)):
        size = whole(plain, stored, "flux").shape[0]
        kept = np.atleast_1d(np.arange(size)[isel.get("time", slice(None))])
        spans = range(-min(0, *steps), len(kept) - max(0, *steps))
        numbers += [(stored, [int(kept[i + s]) for s in steps]) for i in spans]
    options = {"halo": 1, "ghosts": "disk", "steps": steps, "isel": isel, "cache_bytes": 0}
    if not numbers:
        with pytest.raises(ConfigError, match="there would be no sample"):
            StoreReader(path, ReadOptions(**options), num_parts=3)
        return
    reader = StoreReader(path, ReadOptions(**options), num_parts=3)
    assert reader.numbering.sample_dim == "time"
    assert reader.num_samples == len(numbers)
    for index in data.draw(st.lists(st.integers(0, len(numbers) - 1), max_size=2)):
        stored, rows = numbers[index]
        parts = [reader.read(index, p) for p in range(3)]
        for name in reader.fields:
            dim = reader.entity_dim(name)
            entity = reader.info(name).entity
            values = expected(reader, name, stored, rows, isel)
            assert reader.global_shape(name, index) == values.shape
            assert len(reader.dims(name)) == values.ndim
            for part in parts:
                ids = part.index_maps[entity].to_global(np.arange(part.index_maps[entity].num_local))
                assert np.array_equal(part.fields[name], values.take(ids, dim)), name
        plan = reader.plan(index, 1)
        cut = sum(p.bytes_fetched for plans in reader._partition(stored)[1].values() for p in plans)
        assert plan.bytes_fetched == parts[1].stats.bytes_fetched + cut


def test_only_the_time_asked_for_is_read(tmp_path):
    raw = write_raw(tmp_path / "raw.h5", 4, num_nodes=1030)  # whole chunks are longer than gaps that are read along
    partition(raw, tmp_path / "store", fields=["u", "w"])
    options = ReadOptions(bounds=[0, 1024, 1030], fields=["u", "w"], cache_bytes=0)
    one, all_ = (
        StoreReader(tmp_path / "store", each, num_parts=2) for each in (options, replace(options, sample_dim=False))
    )
    for index in range(4):
        fetched = [sum(p.bytes_fetched for p in plan.fields["u"]) for plan in (one.plan(index), all_.plan(0))]
        assert fetched == [4 * 8196, 16 * 8196]
        assert one.read(index, 0).stats.bytes_fetched == all_.read(0, 0).stats.bytes_fetched - 12 * 8196


def test_every_time_is_a_sample(several):
    reader = StoreReader(several, ReadOptions(fields=["u", "w"]), num_parts=2)
    assert reader.num_samples == sum(TIMES)
    assert [reader.sample_info(i).index for i in (0, 4, 5, -1)] == [0, 0, 1, 1]
    assert reader.dims("u") == ("lev", "node")
    assert reader.dims("w") == ("node", "lev")
    assert reader.read(-1, 0).index == 7
    with pytest.raises(IndexError, match="there are 8 samples along 'time'"):
        reader.read(8, 0)


def test_steps_stay_inside_a_stored_sample(several):
    reader = StoreReader(several, ReadOptions(fields="flux", steps=(0, 2)))
    assert reader.num_samples == 3 + 1
    assert reader.numbering.rows(3) == [0, 2]
    assert reader.read(3, 0).fields["flux"].shape[0] == 2
    assert StoreReader(several, ReadOptions(fields="flux", steps=(0, 4))).num_samples == 1
    with pytest.raises(ConfigError, match=r"steps 0,9 reach over more rows than any stored sample has of 'time'"):
        StoreReader(several, ReadOptions(fields="flux", steps=(0, 9)))


def test_without_time_stored_samples_are_the_samples(several):
    assert StoreReader(several, ReadOptions(fields=["pos", "w"])).num_samples == 2
    whole_ = StoreReader(several, ReadOptions(sample_dim=False))
    assert whole_.num_samples == 2
    assert whole_.global_shape("flux", 0)[0] == 5
    assert StoreReader(several, ReadOptions(fields=["pos", "w"], sample_dim="time")).num_samples == 8
    levels = StoreReader(several, ReadOptions(fields=["u", "w"], sample_dim="lev"))
    assert levels.num_samples == 8
    assert levels.dims("u") == ("time", "node")


def test_the_digest_knows_what_is_chosen(several):
    def digest(num_parts=1, **options):
        return StoreReader(several, ReadOptions(**options), num_parts=num_parts).fingerprint()

    prints = {
        digest(), digest(steps=(1,)), digest(sample_dim=False), digest(isel={"lev": 0}), digest(isel={"lev": 1}),
        digest(isel={"time": slice(2)}),
    }  # fmt: skip
    assert len(prints) == 6
    assert digest(num_parts=3, halo=1) == digest(isel={"lev": slice(None)}, sample_dim="time") == digest()


@pytest.mark.parametrize("steps", [(0,), (0, 1)])
def test_figures_are_those_of_the_components_that_samples_have(store, steps):
    from scidata.data.irregular_dataset import IrregularDataset

    reader = StoreReader(store, ReadOptions(steps=steps, isel={"lev": [3, 1]}))
    ds = IrregularDataset(reader, None, (), dp_axis=None, dtype=None, transform=None)
    v, w = (whole(reader, 0, name) for name in ("v", "w"))
    times = [v.reshape(-1)] * len(steps)
    for name, columns in (("w", [w[:, 3], w[:, 1]]), ("v", times)):
        found = ds.statistics(name)
        for figure, function in ((found.mean, np.mean), (found.std, np.std), (found.min, np.min), (found.max, np.max)):
            np.testing.assert_allclose(np.atleast_1d(figure), [function(c) for c in columns], rtol=1e-12)
        assert np.shape(found.mean) == (() if len(columns) == 1 else (len(columns),))
    assert ds.statistics("u").count == whole(reader, 0, "u").size


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"steps": ()}, ConfigError, "steps is empty"),
        ({"steps": (0, 1), "fields": "w"}, ConfigError, "no field that is read has a time"),
        ({"sample_dim": "tme"}, UnknownNameError, "did you mean 'time'"),
        ({"sample_dim": 0}, ConfigError, r"name the dimension.*time.*lev"),
        ({"isel": {"levs": 0}}, UnknownNameError, "did you mean 'lev'"),
        ({"isel": {"lev": 9}}, ConfigError, "isel of 'lev' in field 'node/[uw]': index 9 is out of range"),
        ({"isel": {"lev": slice(9, None)}}, ConfigError, "leaves no rows of 'lev'"),
        ({"isel": {"node": slice(9)}}, ConfigError, "cut by rank, not cropped"),
    ],
)
def test_what_cannot_be_honoured(several, options, error, words):
    with pytest.raises(error, match=words):
        StoreReader(several, ReadOptions(**options))


def test_fields_that_differ_in_times(tmp_path):
    with h5py.File(tmp_path / "raw.h5", "w") as file:
        file["points"] = np.random.default_rng(0).random((20, 2))
        for name, times in (("u", 2), ("v", 3)):
            data = file.create_dataset(f"point/{name}", data=np.zeros((20, times)))
            data.dims[1].label = "time"
    partition(tmp_path / "raw.h5", tmp_path / "store", kind="points")
    with pytest.raises(FieldMismatchError, match="differ in how many 'time'"):
        StoreReader(tmp_path / "store")
    assert StoreReader(tmp_path / "store", ReadOptions(fields="v")).num_samples == 3
    assert StoreReader(tmp_path / "store", ReadOptions(sample_dim=False)).num_samples == 1
