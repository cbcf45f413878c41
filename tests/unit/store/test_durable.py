"""Files that outlive a crash, and folders that are gone when they are removed."""

from __future__ import annotations

import threading
from pathlib import Path

from scidata.store.format.durable import remove


def test_a_folder_goes_in_which_files_come_and_go(tmp_path: Path) -> None:
    """As those of zarr's threads do, after one of them has failed."""
    folder = tmp_path / "sample.zarr"
    folder.mkdir()
    names = [folder / f"{number}.partial" for number in range(2000)]
    for name in names:
        name.touch()

    def come_and_go() -> None:
        for name in reversed(names):
            name.unlink(missing_ok=True)
        for name in names[:50]:
            if folder.exists():
                try:
                    name.touch()
                except FileNotFoundError:
                    return

    other = threading.Thread(target=come_and_go)
    other.start()
    remove(str(folder))
    other.join()
    assert not folder.exists()


def test_what_is_not_there_needs_no_removing(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    remove(str(tmp_path / "file"), str(tmp_path / "link"), str(tmp_path / "absent"))
    assert not list(tmp_path.iterdir())
