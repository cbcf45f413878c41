"""Settings for all tests."""

from collections.abc import Iterator

import pytest
import torch.distributed as dist
from hypothesis import settings

# A slow machine is no failure of what is tested.
settings.register_profile("scidata", deadline=None)
settings.load_profile("scidata")


@pytest.fixture(autouse=True)
def no_group_left() -> Iterator[None]:
    """End a process group that a test made in this process: init_mesh() does, and the next test may make its own."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
