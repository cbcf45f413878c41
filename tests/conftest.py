"""Settings for all tests."""

import signal
from collections.abc import Iterator

import pytest
import torch.distributed as dist
from hypothesis import settings

from scidata.sources.access import object_stores

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # in the background of a script, where shells ignore Ctrl-C
    signal.signal(signal.SIGINT, signal.default_int_handler)

# A slow machine is no failure of what is tested.
settings.register_profile("scidata", deadline=None)
settings.load_profile("scidata")


@pytest.fixture(params=["obstore", "fsspec"])
def engine(request, monkeypatch):
    """What makes the requests to object stores: the tests that use this run with either."""
    if request.param == "obstore":
        pytest.importorskip("obstore", reason="the other engine needs obstore")
    monkeypatch.setattr(object_stores, "enabled", request.param == "obstore")
    return request.param


# Each takes some seconds or more, and a smaller one beside it says most of what it says: ``pytest -m slow`` runs them.
SLOW = (
    "test_ops_sorting.py::test_of_values[4-True]",
    "test_ops_sorting.py::test_along_a_dim[4-True]",
    "test_rank_faults.py::test_ranks_end_together[kill-collective-2-1]",
    "test_rank_faults.py::test_ranks_end_together[exit 0-collective-3-1]",
    "test_rank_faults.py::test_ranks_end_together[exit 3-next-2-0]",
    "test_rank_faults.py::test_ranks_end_together[stop-compute-2-0]",
    "test_rank_faults.py::test_ranks_end_together[stop-next-3-1]",
    "test_hetero_khop.py::test_loss_and_gradients_of_one_process[2]",
    "test_watch.py::test_scripts_hear_of_each_other[error-1-False]",
    "test_watch.py::test_scripts_hear_of_each_other[kill-0-False]",
    "test_watch.py::test_scripts_hear_of_each_other[kill-1-True]",
    "test_parallel_training.py::test_a_compiled_model_gives_the_same[fsdp]",
    "test_parallel_training.py::test_checkpoints_resume_on_other_numbers_of_ranks[fsdp-ddp]",
    "test_pyg.py::test_stock_layers_give_what_one_process_gives[4]",
    "test_ops_interpolate.py::test_interpolation[4]",
    "test_ops_pooling.py::test_pools[4]",
    "test_models.py::test_images[4]",
    "test_ops_attention.py::test_three_ways_one_result[4]",
    "test_ops_linalg.py::test_any_dims_of_any_operand[4-True]",
    "test_conformance.py::test_every_case[4-False]",
    "test_fuzz.py::test_planted_faults_are_noticed",
    "test_fuzz.py::test_a_case_is_the_same_each_time",
    "test_board.py::test_the_others_say_why[2-raise]",
    "test_board.py::test_the_others_say_why[2-sys.exit(1)]",
    "test_opinfo.py::test_nothing_is_wrong[12]",
    "test_netcdf.py::test_a_flipped_bit_of_the_header_is_refused_where_c_refuses_it[5-2]",
    "test_netcdf.py::test_a_flipped_bit_of_the_header_is_refused_where_c_refuses_it[2-2]",
    "test_hostile.py::test_every_byte_is_verified[added]",
    "test_hostile.py::test_every_byte_is_verified[removed]",
    "test_rank_faults.py::test_ranks_end_together[transform-shard op-2-1]",
    "test_rank_faults.py::test_ranks_end_together[kill-handle-2-1]",
    "test_rank_faults.py::test_ranks_end_together[kill-shard op-2-0]",
    "test_files.py::test_every_value_under_a_low_limit_of_open_files[layouts1]",
    "test_depth.py::test_peak_memory_and_no_growth[4]",
    "test_open_dataset.py::test_a_grid_loads_no_mesh_format_and_no_store_writer[netcdf4]",
    "test_memory_order.py::test_like_one_process[2]",
    "test_ops_reductions.py::test_every_reduction_and_its_gradient[2]",
    "test_ops_pointwise.py::test_every_unary_and_binary_name[2]",
    "test_surface.py::test_every_way_in_is_right_or_raises[sizes1]",
    "test_conformance.py::test_every_case[2-False]",
    "test_conformance.py::test_every_case[4-True]",
    "test_pyg.py::test_stock_layers_give_what_one_process_gives[2]",
    "test_graph_exchange.py::test_exchange_functions_and_hops[4]",
    "test_transforms.py::test_like_one_process[3-2]",
    "test_transforms.py::test_like_one_process[3-3]",
    "test_watch.py::test_scripts_hear_of_each_other[kill-0-True]",
    "test_files_of_others.py::test_graphs_of_pytorch_geometric[pyg_list]",
    "test_workers.py::test_ctrl_c[process-begun]",
    "test_rank_faults.py::test_ranks_end_together[raise-collective-3-0]",
    "test_hetero.py::test_as_in_one_process[2]",
    "test_transforms.py::test_like_one_process[2-0]",
    "test_transforms.py::test_like_one_process[2-1]",
    "test_transforms.py::test_like_one_process[2-2]",
    "test_transforms.py::test_like_one_process[2-3]",
    "test_ops_composed.py::test_like_one_process[2]",
    "test_ops_neighbours.py::test_like_one_process[2]",
    "test_ops_sorting.py::test_of_values[2-False]",
    "test_ops_sorting.py::test_along_a_dim[2-False]",
    "test_loader_trainers.py::test_lightning[1]",
    "test_metrics.py::test_data_sets[True]",
    "test_object_stores.py::test_as_many_requests_as_a_server_bears[fsspec]",
    "test_files_of_others.py::test_graphs_of_pytorch_geometric_before_2[True]",
    "test_node_decoding.py::test_each_codec_and_layout_is_decoded_once[False-2]",
    "test_node_decoding.py::test_each_codec_and_layout_is_decoded_once[blocks-2]",
    "test_dask.py::TestWork::test_a_piece_that_kills_workers",
    "test_output.py::test_the_same_for_any_number_of_ranks[2-2-names1-shard1-even]",
    "test_output.py::test_the_same_for_any_number_of_ranks[3-3-names3-shard3-even]",
    "test_output.py::test_the_same_for_any_number_of_ranks[4-4-names4-shard4-bounds4]",
)
#: Of few tests that take minutes: first, so that the others go on beside them.
FIRST = ("test_build.py", "test_typing.py", "test_fuzz.py", "test_files_of_others.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.nodeid.endswith(SLOW):
            item.add_marker("slow")
    items.sort(key=lambda item: item.path.name not in FIRST)


@pytest.fixture(autouse=True)
def no_group_left() -> Iterator[None]:
    """End a process group that a test made in this process: init_mesh() does, and the next test may make its own."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
