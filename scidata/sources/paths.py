"""The stores that a path, a list of paths or a glob names."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from scidata.core.urls import Url, is_url, url_of
from scidata.errors import ConfigError
from scidata.sources.access.files import files
from scidata.sources.collections import steps_of
from scidata.sources.groups import expand_groups, samples_of_folder, split_group


def check_paths(path: object) -> None:
    """Refuse a value that is neither a path nor a list of paths."""
    kind = type(path).__name__
    if hasattr(path, "shape") and hasattr(path, "dtype"):
        raise ConfigError(
            f"path= is an array of shape {tuple(path.shape)}, not a path or URL; scidata.scatter_tensor shards a "
            "tensor, scidata.shard_dataset the samples of a torch data set"
        )
    if hasattr(path, "read"):
        raise ConfigError(f"path is an open file ({kind}), where a path or URL, or a list of them is expected")
    if isinstance(path, bytes) or not hasattr(path, "__iter__"):
        raise ConfigError(f"path={path!r}: expected a path or URL, or a list of them, not {kind}")
    for item in path if isinstance(path, list | tuple) else ():
        if not isinstance(item, str | os.PathLike):
            check_paths(item)
            raise ConfigError(f"path: expected a path or URL, or a list of them, and {item!r:.80} of the list is none")


def check_seen(paths: Iterable[str], what: str) -> None:
    """Raise FileNotFoundError if this process, of any machine, does not see files that another one opens.

    It lets go of those that it has open: they may have been replaced since.
    """
    for path in paths:
        if not is_url(path) and not os.path.lexists((split_group(path) or (path, ""))[0]):
            raise FileNotFoundError(
                f"it does not see {path}; {what} must be on a file system that workers and client share, under the "
                "same path"
            )
    files().close()


def expand_paths(
    path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]], options: Mapping[str, Any] | None = None
) -> tuple[str, ...]:
    """Return the stores that a path, a list of paths or a glob names, in reading order.

    Of a collection of ParaView (``.pvd``) its files in the order of time.

    Raises FileNotFoundError: a glob matches nothing, or the list is empty; ConfigError: two URLs differ only in their
    query or user, which are not shown.
    """
    if isinstance(path, str | os.PathLike):
        name = os.fspath(path)
        if is_url(name):
            return (url_of(name, options),)
        name = os.path.expanduser(url_of(name, options))
        if not glob.has_magic(name) or os.path.exists(name):
            return samples_of_folder(name) or steps_of(name)
        matches = tuple(sorted(glob.glob(name, recursive=True))) or expand_groups(name)
        if name.lower().endswith(".pvd"):  # one among others, as of "*", would name them twice
            matches = tuple(step for each in matches for step in steps_of(each))
        if not matches:
            raise FileNotFoundError(f"{name}: no file matches this pattern, nor does a group of a file")
        return matches
    check_paths(path)
    names = tuple(name for item in path for name in expand_paths(item, options))
    if not names:
        raise FileNotFoundError("the list of paths is empty")
    targets: dict[str, str] = {}
    for name in names:
        if isinstance(name, Url) and targets.setdefault(name, name.target) != name.target:
            raise ConfigError(
                f"{name}: two URLs differ only in their query or user, which may be secret, so that messages and plans "
                "could not tell them apart; give the objects paths of their own"
            )
    return names
