"""URLs without their credentials.

Userinfo, the query (signatures of presigned URLs) and ``storage_options`` are secrets. A :class:`Url` is a string that
shows none of them, so that it may go into any message, plan or manifest; what is opened goes along unseen. Plans and
layouts keep the text alone: whoever reads binds it to the source's own URL again.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from scidata.errors import ConfigError

__all__ = ["Url", "is_url", "public_text", "url_of"]

_USERINFO = re.compile(r"(?<=://)[^/?#\s'\"<>]*@")
_QUERY = re.compile(r"(\w[\w+.-]*://[^\s'\"<>?]*)\?[^\s'\"<>]*")
_HIDDEN = "..."
#: Options whose values say where a server is and how it is spoken to, and help in a message.
_PUBLIC_OPTIONS = frozenset(
    {"endpoint_url", "region_name", "region", "protocol", "signature_version", "addressing_style"}
)
_MIN_SECRET = 4  # shorter values would tear messages apart


def is_url(path: str) -> bool:
    """Say whether ``path`` is read through fsspec."""
    return "://" in path


def public_text(text: str) -> str:
    """Return a text without userinfo and queries of the URLs in it."""
    return _QUERY.sub(rf"\1?{_HIDDEN}", _USERINFO.sub("", text))


def url_of(path: str, options: Mapping[str, Any] | None = None) -> str:
    """Return a :class:`Url`, or a local path as it is.

    Parameters
    ----------
    options
        What fsspec's file system is made with; None keeps those that ``path`` has.

    Raises
    ------
    ConfigError
        Options for a local path.
    """
    if not is_url(path):
        if options:
            raise ConfigError(f"storage_options: means nothing for {path}, which is no URL; leave it out")
        return path
    if isinstance(path, Url):
        return path if options is None else Url(path.target, options)
    return Url(path, options or {})


class Url(str):
    """The text of a URL that may be shown; compares and hashes as that text. Pickles with all that opens it.

    Attributes
    ----------
    target
        The URL itself, for fsspec alone.
    options
        What fsspec's file system is made with.
    """

    target: str
    options: Mapping[str, Any]

    def __new__(cls, target: str, options: Mapping[str, Any], *, text: str | None = None) -> Url:
        target = target if target.endswith("://") else target.rstrip("/")
        self = super().__new__(cls, _hidden(target) if text is None else text)
        self.target, self.options = target, dict(options)
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickled, (self.target, self.options, str(self))

    def at(self, key: str) -> Url:
        """Return the URL of what lies below: in a chain (``cache::s3://...``) the first part with a path takes it."""
        if not key:
            return self
        return Url(_joined(self.target, key), self.options, text=_joined(str(self), key))

    def bound(self, text: str) -> str:
        """Return the URL that a text made by :meth:`at` stands for."""
        before, after = _split(self)
        if not (text.startswith(before) and text.endswith(after)):
            return url_of(text)
        return self.at(text[len(before) : len(text) - len(after)].lstrip("/"))

    def public(self, text: str) -> str:
        """Return what somebody else says about this URL, without its secrets."""
        text = text.replace(self.target, str(self))
        for secret in self._secrets():
            text = text.replace(secret, _HIDDEN)
        return public_text(text)

    def _secrets(self) -> list[str]:
        found = set(_leaves(self.options))
        for part in self.target.split("::"):
            for match in _USERINFO.finditer(part):
                found |= {*re.split("[:@]", match[0]), match[0]}
            query = part.partition("?")[2]
            found |= {query, *re.split("[&=]", query)}
        return sorted((s for s in found if len(s) >= _MIN_SECRET), key=len, reverse=True)


def _unpickled(target: str, options: Mapping[str, Any], text: str) -> Url:
    return Url(target, options, text=text)


def _hidden(target: str) -> str:
    """Return a whole URL's public text; unlike in a message, spaces and quotes do not end it."""
    parts = _USERINFO.sub("", target).split("::")
    return "::".join(f"{part.partition('?')[0]}?{_HIDDEN}" if "?" in part else part for part in parts)


def _split(url: str) -> tuple[str, str]:
    """Return what comes before the key of something below a URL, and what after it."""
    parts = str(url).split("::")
    at = next(i for i, part in enumerate(parts) if "://" in part)
    path, mark, query = (
        parts[at].partition("?") if parts[at].startswith(("http://", "https://")) else (parts[at], "", "")
    )
    rest = [mark + query, *parts[at + 1 :]]
    return "::".join([*parts[:at], path]), "::".join(rest)


def _joined(url: str, key: str) -> str:
    before, after = _split(url)
    return f"{before}{key}{after}" if before.endswith("://") else f"{before.rstrip('/')}/{key}{after}"


def _leaves(options: Any) -> Iterator[str]:
    """Every text in nested options that may be a secret."""
    if isinstance(options, Mapping):
        for name, value in options.items():
            if name not in _PUBLIC_OPTIONS:
                yield from _leaves(value)
    elif isinstance(options, str):
        yield options
    elif isinstance(options, bytes):
        yield options.decode("latin-1")
    elif isinstance(options, Sequence | set | frozenset):
        for value in options:
            yield from _leaves(value)
