"""An S3 server for the tests of a module."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.unit._s3 import Server, serve


@pytest.fixture(scope="module")
def s3() -> Iterator[Server]:
    with serve() as server:
        yield server
