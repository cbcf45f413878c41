"""A set as zarr-python reads it, for codecs that only that knows. Imported where it is needed."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from typing import TYPE_CHECKING

from zarr.abc.store import ByteRequest, OffsetByteRequest, RangeByteRequest, Store, SuffixByteRequest

from scidata.sources.references.locator import ReferenceLocator
from scidata.sources.zarr.metadata import ArrayRecord
from scidata.sources.zarr.tree import Tree

if TYPE_CHECKING:
    from zarr.core.buffer import Buffer, BufferPrototype


class ArrayStore(Store):
    """The metadata and chunks of one array, by their keys in the set; each chunk where the set may lead."""

    supports_writes = False
    supports_deletes = False
    supports_partial_writes = False
    supports_listing = False

    def __init__(self, tree: Tree, locator: ReferenceLocator, record: ArrayRecord) -> None:
        super().__init__(read_only=True)
        self._tree, self._locator, self._record = tree, locator, record

    def __eq__(self, other: object) -> bool:
        return self is other

    __hash__ = Store.__hash__

    def _read(self, key: str) -> bytes | None:
        place = self._record.place_of(key)
        return self._tree.get([key]).get(key) if place is None else self._locator.read(self._record, place)

    async def get(
        self, key: str, prototype: BufferPrototype | None = None, byte_range: ByteRequest | None = None
    ) -> Buffer | None:
        """Return a document or a chunk."""
        from zarr.core.buffer import default_buffer_prototype

        data = self._read(key)
        kind = (prototype or default_buffer_prototype()).buffer
        return None if data is None else kind.from_bytes(_part(data, byte_range))

    async def get_partial_values(
        self, prototype: BufferPrototype, key_ranges: Iterable[tuple[str, ByteRequest | None]]
    ) -> list[Buffer | None]:
        """Return several parts."""
        return [await self.get(key, prototype, part) for key, part in key_ranges]

    async def exists(self, key: str) -> bool:
        """Say whether there is a document or a chunk."""
        return self._read(key) is not None

    async def set(self, key: str, value: Buffer) -> None:
        """Refuse to write."""
        raise NotImplementedError

    async def delete(self, key: str) -> None:
        """Refuse to write."""
        raise NotImplementedError

    async def _no_keys(self) -> AsyncIterator[str]:
        return
        yield  # which makes it a generator

    def list(self) -> AsyncIterator[str]:
        """List nothing."""
        return self._no_keys()

    def list_prefix(self, prefix: str) -> AsyncIterator[str]:
        """List nothing."""
        return self._no_keys()

    def list_dir(self, prefix: str) -> AsyncIterator[str]:
        """List nothing."""
        return self._no_keys()


def _part(data: bytes, wanted: ByteRequest | None) -> bytes:
    match wanted:
        case RangeByteRequest(start=start, end=end):
            return data[start:end]
        case OffsetByteRequest(offset=offset):
            return data[offset:]
        case SuffixByteRequest(suffix=suffix):
            return data[-suffix:]
    return data
