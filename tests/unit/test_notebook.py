"""What notebooks show: small, escaped, the figures that the objects have; and reprs that can be read."""

import re
from html.parser import HTMLParser

import h5py
import numpy as np
import pytest

import scidata
from scidata.testing import make_grid

HOSTILE = "<script>alert('x')</script>&\x1b[2J\u202e"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("notebook")
    make_grid(path / "era5.zarr", chunks=(1, 3, 7, 24))
    with h5py.File(path / "mesh.h5", "w") as file:
        file["points"] = np.array([[0.0, 0], [1, 0], [1, 1], [0, 1], [2, 0]])
        file["cells"] = np.array([[0, 1, 2], [0, 2, 3], [1, 4, 2]])
        file["u"] = np.arange(5.0)
    scidata.partition(path / "mesh.h5", path / "mesh.store")
    return path


class Page(HTMLParser):
    """The texts of a page, and that its tags are balanced."""

    def __init__(self, text):
        super().__init__()
        self.open, self.texts, self.tags = [], [], set()
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        if tag != "br":
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)


def shown(thing):
    page = Page(thing._repr_html_())
    assert page.tags <= {"div", "b", "table", "tr", "th", "td", "br"}
    return page.texts


def test_grids(folder):
    mesh = scidata.init_mesh()
    ds = scidata.open_dataset(folder / "era5.zarr", mesh, shard={"latitude": "domain"}, halo={"latitude": 2})
    size = ds.global_shape("u")[1]
    assert {"ShardedDataset", f"split: latitude over domain: [{size}]", "halo: latitude 2:2", "u"} <= {*shown(ds)}
    sample = ds[0]
    assert {"Sample", "index: 0", "float32", str(tuple(sample["u"].to_local().shape))} <= {*shown(sample)}
    assert {"ShardTensor", "domain", "dim 1", str(size)} <= {*shown(sample["u"])}
    plan = ds.plan(0)
    assert str(plan.num_chunks) in shown(plan)
    assert f"{plan.amplification:.2f}" in shown(plan)
    assert re.match(r"ReadPlan\(sample 0, rank 0: .* fetched for .* wanted .*; t, u, v\)$", repr(plan))
    assert scidata.subset(ds, [1])._repr_html_()


def test_meshes(folder):
    ds = scidata.open_dataset(folder / "mesh.store", scidata.init_mesh(), halo=1)
    assert {"kind: mesh", "nodes: 5", "u", "node"} <= {*shown(ds)}
    assert "nodes: 5 owned and 0 ghosts here, 5 in all" in shown(ds[0])
    assert repr(ds[0].index_map("node")) == "IndexMap(part 0 of 1: rows 0:5 of 5, 0 ghosts)"
    assert "ReadPlan" in shown(ds.plan(0))


def test_loaders(folder):
    ds = scidata.open_dataset(folder / "era5.zarr", scidata.init_mesh(), fields=["u"])
    loader = scidata.DataLoader(ds, 2, shuffle=True, num_workers=1, drop_last=True)
    assert repr(loader) == (
        f"DataLoader({ds!r}, {len(loader)} batches of 2, order: DistributedSampler({len(ds)} samples, shuffle=True, "
        "seed=0, epoch=0, drop_last=True), 1 thread, 2 ahead)"
    )
    loader.set_epoch(3)
    assert "epoch=3" in repr(loader)
    assert "ShardedDataset" in shown(loader)
    plain = scidata.DataLoader(scidata.open_dataset(folder / "era5.zarr"), batch_size=None, num_workers=0)
    assert repr(plain).endswith("samples, order: as stored, the calling thread)")
    for _ in loader:
        pass
    assert {"LoaderStats", f"handed out: {len(loader)} batches"} <= {
        text.split(",")[0] for text in shown(loader.stats())
    }
    blocks = scidata.DistributedSampler(ds, shuffle="blocks", seed=4)
    assert repr(blocks) == f'DistributedSampler({len(ds)} samples, shuffle="blocks", seed=4, epoch=0)'


def test_names_are_escaped(tmp_path):
    name = HOSTILE.replace("/", "_")
    with h5py.File(tmp_path / "a.h5", "w") as file:
        for field in ("u", name):
            data = file.create_dataset(field, data=np.ones((3, 8, 6)))
            for dim, label in zip(data.dims, ("time", "y" + name, "x"), strict=True):
                dim.label = label
    ds = scidata.open_dataset(tmp_path / "a.h5", kind="grid", sample_dim="time")
    for thing in (ds, ds[0], ds.plan(0), scidata.DataLoader(ds), scidata.concat(ds, ds)):
        text = thing._repr_html_()
        assert shown(thing)
        assert "<script" not in text
        assert text.isprintable()
    assert "&lt;script&gt;" in ds._repr_html_()


def test_many_rows_are_cut():
    from scidata.core.html import MANY, card

    text = card("many", {"none": None}, ("n",), [(i,) for i in range(MANY + 5)])
    assert "5 more" in text
    assert text.count("<tr>") == MANY + 2
    assert "none" not in text
