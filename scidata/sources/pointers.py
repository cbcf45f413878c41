"""Files that stand for others which were not fetched."""

from __future__ import annotations

from scidata.errors import CorruptDataError

_GIT_LFS = b"version https://git-lfs.github.com/spec/"


def check_pointer(begin: bytes, where: str) -> None:
    """Refuse a pointer of Git LFS, as it lies in a clone until the file itself is fetched."""
    if begin.startswith(_GIT_LFS):
        raise CorruptDataError(f"{where}: is a pointer of Git LFS, not the file itself; fetch that: git lfs pull")
