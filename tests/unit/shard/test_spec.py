"""ShardSpec: pure metadata, checked without communication at sizes no test machine has."""

import gc
import io
import pickle
import weakref
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from scidata.errors import ConfigError, ShardLayoutError
from scidata.shard import HaloDim, ShardSpec, ShardTensor
from scidata.shard.ops.reshaping import Group, reshape_groups
from scidata.testing import fake_group


def test_even_sizes_bounds_and_offsets_at_64_ranks():
    with fake_group(64, rank=5):
        mesh = init_device_mesh("cpu", (8, 8), mesh_dim_names=("h", "w"))
        spec = ShardSpec.even(mesh, [Shard(-2), Shard(3)], (2, 3, 721, 1440))
        assert spec.placements == (Shard(2), Shard(3))
        assert spec.sizes == ((91, *[90] * 7), (180,) * 8)
        assert spec.local_shape == (2, 3, 91, 180)
        assert spec.offsets == (0, 0, 0, 5 * 180)
        assert np.array_equal(spec.dim_bounds(2)[0], np.concatenate([[0], np.cumsum([91, *[90] * 7])]))
        assert (spec.axis_of_dim(2), spec.axis_of_dim(3), spec.axis_of_dim(0)) == (0, 1, None)
        assert spec.coordinate(1) == 5
        assert spec.dim_bounds(0)[0].tolist() == [0, 2]
        assert not spec.is_replicated


def test_equal_layouts_are_equal_and_hash_alike():
    with fake_group(4, rank=1):
        mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("domain",))
        one = ShardSpec.even(mesh, [Shard(0)], (10, 2))
        two = ShardSpec.even(mesh, [Shard(-2)], (10, 2), {"domain": (3, 3, 2, 2)})
        assert one == two
        assert hash(one) == hash(two)
        assert one != ShardSpec.even(mesh, [Shard(0)], (10, 2), {0: (4, 2, 2, 2)})
        assert "sizes (3, 3, 2, 2)" in str(one)


@pytest.mark.parametrize(
    ("placements", "shape", "sizes", "message"),
    [
        ([Shard(0)], (10,), {}, "2 mesh axes need as many placements"),
        ([Shard(0), Shard(0)], (10, 4), {}, "'h' and 'w' both shard dim 0"),
        ([Shard(0), Shard(-2)], (10, 4), {}, "both shard dim 0"),
        ([Shard(2), Replicate()], (10, 4), {}, "out of range"),
        ([Shard(0), Partial()], (10, 4), {}, "neither Shard"),
        ([Shard(0), Replicate()], (10, 4), {"h": (5, 4)}, r"add up to 9, but dim 0 .* has 10"),
        ([Shard(0), Replicate()], (10, 4), {"h": (11, -1)}, "add up to 10"),
        ([Shard(0), Replicate()], (10, 4), {"h": (5, 3, 2)}, "has 2 ranks"),
        ([Shard(0), Replicate()], (10, 4), {"w": (2, 2)}, "which replicates"),
        ([Shard(0), Replicate()], (10, 4), {"x": (5, 5)}, "the mesh has"),
        ([Shard(0), Replicate()], (10, 4), [(5, 5)], "a dict by mesh axis"),
        ([Shard(0), Replicate()], (10, 4), {"h": "55"}, "integers for each of its 2 ranks"),
        ([Shard(0), Replicate()], (10, 4), {"h": 5}, "integers for each"),
        ([Shard(0), Replicate()], (10, 4), {"h": (5.0, 5)}, "integers for each"),
    ],
)
def test_contradictions_raise_with_numbers(placements, shape, sizes, message):
    with fake_group(4):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("h", "w"))
        with pytest.raises(ShardLayoutError, match=message):
            ShardSpec.even(mesh, placements, shape, sizes)


def test_more_ranks_than_rows_needs_explicit_sizes():
    with fake_group(4):
        mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("domain",))
        with pytest.raises(ConfigError, match="some ranks would be empty"):
            ShardSpec.even(mesh, [Shard(0)], (3,))
        assert ShardSpec.even(mesh, [Shard(0)], (3,), {0: (1, 0, 1, 1)}).sizes == ((1, 0, 1, 1),)


def test_a_rank_outside_the_mesh_is_told():
    with fake_group(4, rank=3):
        mesh = torch.distributed.device_mesh.DeviceMesh("cpu", [0, 1], mesh_dim_names=("domain",))
        with pytest.raises(ShardLayoutError, match="rank 3 is not part"):
            ShardSpec.even(mesh, [Shard(0)], (4,))


def test_explicit_shapes_are_checked_against_the_own_part():
    with fake_group(3, rank=1):
        mesh = init_device_mesh("cpu", (3,), mesh_dim_names=("domain",))
        local = torch.zeros(2, 4, 5)
        shapes = {"domain": [(2, 3, 5), (2, 4, 5), (2, 0, 5)]}
        x = ShardTensor.from_local(local, mesh, [Shard(1)], sharding_shapes=shapes)
        assert x.shape == (2, 7, 5)
        assert x.to_local() is local
        assert x.sharding_shapes() == {0: tuple(torch.Size(s) for s in shapes["domain"])}
        assert x.offsets == (0, 3, 0)
        for wrong, message in [
            ([(2, 3, 5), (2, 5, 5), (2, 0, 5)], r"holds \(2, 4, 5\)"),
            ([(2, 3, 5), (2, 4, 5)], "has 3 ranks"),
            ([(2, 3, 5), (2, 4, 5), (1, 0, 5)], "more than the sharded dim 1"),
            ([(2, 3), (2, 4), (2, 0)], "more than the sharded dim"),
        ]:
            with pytest.raises(ShardLayoutError, match=message):
                ShardTensor.from_local(local, mesh, [Shard(1)], sharding_shapes={0: wrong})
        with pytest.raises(ShardLayoutError, match="nothing for axis"):
            ShardTensor.from_local(local, mesh, [Shard(1)], sharding_shapes={})
        with pytest.raises(ShardLayoutError, match='"infer" or a dict'):
            ShardTensor.from_local(local, mesh, [Shard(1)], sharding_shapes="chunk")
        with pytest.raises(ShardLayoutError, match="integers for each of its 3 ranks"):
            ShardTensor.from_local(local, mesh, [Shard(1)], sharding_shapes={0: [2, 2, 2]})
        with pytest.raises(ShardLayoutError, match="one for each axis"):
            x.redistribute(mesh, Shard(0))
        with pytest.raises(ShardLayoutError, match="a dict by mesh axis"):
            x.redistribute(sizes=[[3, 2, 2]])
        with pytest.raises(ShardLayoutError, match="not a ShardTensor"):
            ShardTensor.from_local(x, mesh, [Shard(1)])
        with pytest.raises(ShardLayoutError, match="the layout gives this rank"):
            ShardTensor(torch.zeros(2, 3, 5), x.spec)


def test_padded_parts_are_checked():
    with fake_group(3, rank=0):
        mesh = init_device_mesh("cpu", (3,), mesh_dim_names=("domain",))
        spec = ShardSpec.even(mesh, [Shard(0)], (7, 4))
        halo = {0: HaloDim(lo=2, hi=1), -1: HaloDim(lo=1, hi=1, periodic=True)}
        x = ShardTensor.from_padded(torch.arange(24.0).reshape(4, 6), spec, halo)
        assert torch.equal(x.to_local(), torch.arange(24.0).reshape(4, 6)[:3, 1:5])
        assert x.halo == {0: halo[0], 1: halo[-1]}
        with pytest.raises(ShardLayoutError, match=r"has shape \(5, 6\), but owned \(3, 4\)"):
            ShardTensor.from_padded(torch.zeros(5, 6), spec, halo)
    with pytest.raises(ConfigError, match="negative"):
        HaloDim(lo=-1, hi=0)


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ((2, 3), (6,), [((0, 1), (0,))]),
        ((6,), (2, 3), [((0,), (0, 1))]),
        ((2, 3, 4), (2, 12), [((0,), (0,)), ((1, 2), (1,))]),
        ((4, 6), (3, 8), [((0, 1), (0, 1))]),
        ((1, 4), (4,), [((0,), ()), ((1,), (0,))]),
        ((4,), (1, 4, 1), [((), (0,)), ((0,), (1,)), ((), (2,))]),
        ((2, 1, 3), (2, 3), [((0,), (0,)), ((1,), ()), ((2,), (1,))]),
        ((), (), []),
        ((1, 1), (), [((0,), ()), ((1,), ())]),
    ],
)
def test_reshapes_are_cut_into_groups_of_equal_product(old, new, expected):
    groups = [Group(range(*_ends(o)), range(*_ends(n))) for o, n in expected]
    assert [(list(g.old), list(g.new)) for g in reshape_groups(old, new)] == [
        (list(g.old), list(g.new)) for g in groups
    ]


def _ends(dims):
    return (dims[0], dims[-1] + 1) if dims else (0, 0)


def test_what_is_kept_of_a_mesh_goes_with_it_and_is_not_saved():
    with fake_group(2):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("domain",))
        x = ShardTensor(torch.ones(2, 4), ShardSpec.even(mesh, [Shard(0)], (4, 4)))
        assert ShardSpec.even(mesh, [Shard(0)], (4, 4)) is x.spec
        assert (x + 1)[:, 1:3].sum(1).spec is x[:, 0].spec
        other = pickle.loads(pickle.dumps(mesh))
        assert ShardSpec.even(other, [Shard(0)], (4, 4)) == x.spec
        saved = io.BytesIO()
        torch.save(DTensor.from_local(torch.ones(2), mesh, [Shard(0)]), saved)
        saved.seek(0)
        assert isinstance(torch.load(saved, weights_only=True), DTensor)
        mesh = weakref.ref(mesh)
        del x
        gc.collect()
        assert mesh() is None


def test_a_layout_that_changes_extent_and_comes_back_is_the_same_object():
    with fake_group(2):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("domain",))
        spec = ShardSpec.even(mesh, [Shard(0)], (4, 4))
        halved = spec.resize((2, 4), [(1, 1)])
        assert halved is spec.resize((2, 4), [(1, 1)])
        assert halved.past_sizes == {(0, 4): (2, 2)}
        assert halved.derive((2, 8), (0,), [(1, 1)]).past_sizes == halved.past_sizes
        assert not spec.derive((2, 8), (0,), [(1, 1)]).past_sizes  # the same layout with another past


def test_what_is_derived_of_a_graph_is_kept_with_its_first_layout_and_not_by_what_is_derived():
    with fake_group(2):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("domain",))
        exchange = type("Exchange", (), {})()
        parts = ((2, 2),)
        first = replace(ShardSpec.even(mesh, [Shard(1)], (2, 4)), exchange=exchange, edge_parts=parts)
        edges = first.derive((4, 8), (0,), [(2, 2)])
        assert first.derive((4, 8), (0,), [(2, 2)]) is edges
        assert edges.derive((4, 8), (0,), [(2, 2)]) is edges
        assert edges.derive((4, 3), (0,), [(2, 2)]) is first.derive((4, 3), (0,), [(2, 2)])
        assert edges.exchange is exchange
        fewer = edges.derive((3, 8), (0,), [(1, 2)])  # edges of their own: of two parts, the order would be lost
        assert fewer.edge_parts == ((1, 2),)
        assert fewer.derive((4, 8), (0,), [(2, 2)]) is not edges
        joined = edges.with_edge_parts([(1, 1), (1, 1)])
        assert joined.derive((4, 2), (0,), [(2, 2)]).edge_parts == ((1, 1), (1, 1))
        assert edges.derive((4, 2), (0,), [(2, 2)]).edge_parts == parts
        gone = weakref.ref(exchange)
        gc.disable()
        try:
            del first, exchange, fewer, joined
            assert edges.derive((4, 5), (0,), [(2, 2)]).exchange is gone()
            del edges
            assert gone() is None
        finally:
            gc.enable()
