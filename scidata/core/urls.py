"""URLs without credentials.

Userinfo, the query (signatures of presigned URLs), the fragment and ``storage_options`` are secrets. A :class:`Url` is
a string that shows none of them, so that it may go into any message, plan or manifest; the real address goes along
unseen. Plans and layouts keep the text alone: whoever reads binds it to the source's own URL again.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any

from scidata.errors import ConfigError

_IN_TEXT = re.compile(r"\w[\w+.-]*://[^\s'\"<>]*")
_CHAIN = re.compile(r"::(?=\w[\w+.-]*(?:::\w[\w+.-]*)*://)")
#: ``host:port``; without a dot it may be ``user:12`` of ``user:12/34@host``.
_HOST_AND_PORT = re.compile(r"(localhost|[\w-]+(\.[\w-]+)+\.?|\[[0-9a-fA-F:.]+\])?:\d*")
#: Protocols whose paths may contain ``#``; elsewhere it begins a fragment.
_KEYED = ("s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "adl", "memory", "file", "local", "hdfs")
_HIDDEN = "..."
#: Options that locate and describe a server, and help in a message.
_PUBLIC_OPTIONS = frozenset(
    {"endpoint_url", "region_name", "region", "protocol", "signature_version", "addressing_style"}
)
#: Names of options that locate a server.
_OF_SERVERS = "endpoint|url|host|port|account_name|project"
_MIN_SECRET = 4  # replacing shorter values would garble messages


def local_path(path: str) -> str | None:
    """Return the local path of a path or ``file://`` URL; None for other URLs."""
    target = path.target if isinstance(path, Url) else path
    for scheme in ("file://", "local://"):
        if target.startswith(scheme) and "::" not in target:
            return target.removeprefix(scheme)
    return None if is_url(target) else target


def absolute(path: str) -> str:
    """Return an absolute local path; ``..`` after a link is resolved against the link's target, as usual."""
    head, dots, tail = f"{os.path.expanduser(path)}/".rpartition("/../")
    return os.path.abspath(os.path.join(os.path.realpath(f"{head}/..") if dots else "", tail))


def is_url(path: str) -> bool:
    """Return True if ``path`` is read through fsspec."""
    return "://" in path


def public_text(text: str) -> str:
    """Return a text with userinfo, queries and fragments removed from its URLs."""
    return _IN_TEXT.sub(lambda found: _hidden(found[0]), text) if "://" in text else text


def url_of(path: str, options: Mapping[str, Any] | None = None) -> str:
    """Return a :class:`Url`, or a local path unchanged.

    ``options``: arguments of fsspec's file system; None keeps those that ``path`` has.
    """
    if not is_url(path):
        if options:
            raise ConfigError(f"storage_options: means nothing for {path}, which is no URL; leave it out")
        return path
    if isinstance(path, Url):
        return path if options is None else Url(path.target, options)
    return Url(path, options or {})


@dataclass(frozen=True, slots=True)
class Version:
    """Identifies one content of an object among versions of the same name; None if a server gives none."""

    size: int | None = None
    etag: str | None = None
    version: str | None = None
    modified: str | None = None

    def differs(self, other: Version) -> str:
        """Describe how another version differs; an empty text if it may be the same."""
        for name in ("etag", "version", "size", "modified"):
            mine, found = getattr(self, name), getattr(other, name)
            if mine is not None and found is not None:
                if mine != found:
                    return f"{name} was {mine} and is {found}"
                if name in ("etag", "version"):
                    return ""  # the same content, even if a cache on the way changed size or time
        return ""

    def with_more(self, other: Version) -> Version:
        """Merge the marks of one content from two answers."""
        return Version(*(b if a is None else a for a, b in zip(astuple(self), astuple(other), strict=True)))


class Seen:
    """First-seen versions of objects of one source, latest ones only. Partly included in pickles."""

    MAX, MAX_SENT = 1 << 15, 1 << 8

    def __init__(self, versions: Iterable[tuple[str, Version]] = ()) -> None:
        self._versions = dict(versions)
        self.pinned: set[str] = set()  # objects of which S3 is asked for the version that was first seen

    def changed(self, name: str, version: Version) -> str:
        """Describe how an object differs from its first version; an empty text if it does not, or is the first."""
        known = self._versions.setdefault(name, version)
        if len(self._versions) > self.MAX:
            with contextlib.suppress(StopIteration, RuntimeError, KeyError):  # another thread may do the same
                del self._versions[next(iter(self._versions))]
        difference = known.differs(version)
        if not difference and known.etag is None and version.etag is not None:
            self._versions[name] = known.with_more(version)
        return difference

    def get(self, name: str) -> Version | None:
        """Return an object's first-seen version."""
        return self._versions.get(name)

    def __reduce__(self) -> tuple[object, ...]:
        return Seen, (list(itertools.islice(self._versions.copy().items(), self.MAX_SENT)),)


class Url(str):
    """Displayable text of a URL; compares and hashes as that text. Pickles with all that is needed to open it."""

    target: str  # the URL itself, only for fsspec
    options: Mapping[str, Any]  # arguments of fsspec's file system
    seen: Seen  # the first versions of objects here and below: shared by all URLs that were made from one

    def __new__(
        cls, target: str, options: Mapping[str, Any], *, text: str | None = None, seen: Seen | None = None
    ) -> Url:
        """Build the displayed text of an address, and keep the address."""
        target = target if target.endswith("://") else target.rstrip("/")
        self = super().__new__(cls, _hidden(target) if text is None else text)
        self.target, self.options, self.seen = target, dict(options), Seen() if seen is None else seen
        return self

    def __reduce__(self) -> tuple[object, ...]:
        return functools.partial(Url, text=str(self), seen=self.seen), (self.target, self.options)

    def at(self, key: str) -> Url:
        """Return the URL of a key below; in a chain (``cache::s3://...``) it is added to the first part with a path."""
        if not key:
            return self
        return Url(_joined(self.target, key), self.options, text=_joined(str(self), key), seen=self.seen)

    def bound(self, text: str) -> str:
        """Return the URL that a text from :meth:`at` denotes."""
        before, after = _split(self)
        if not (text.startswith(before) and text.endswith(after)):
            return url_of(text)
        return self.at(text[len(before) : len(text) - len(after)].lstrip("/"))

    def public(self, text: str) -> str:
        """Return another package's message about this URL without secrets."""
        text = text.replace(self.target, str(self))
        for secret in self._secrets():
            text = text.replace(secret, _HIDDEN)
        return public_text(text)

    @property
    def identity(self) -> str:
        """The address with its query, but without user and password. Secret: only used in digests."""
        parts = map(_parted, _chained(self.target))
        return "::".join([scheme + rest for scheme, _, rest in parts])

    @property
    def server(self) -> str:
        """The options that locate the server. Secret as well."""
        found = {name: value for name, value in _named(self.options) if re.search(_OF_SERVERS, name)}
        return repr(sorted(found.items()))

    def check(self) -> None:
        """Reject a user or password that clients would take for a port, and print in their errors."""
        for part in _chained(self.target):
            _, userinfo, _ = _parted(part)
            port = re.split("[/?#]", userinfo, maxsplit=1)[0].rpartition(":")[2]
            if userinfo and "@" not in port and not port.isdecimal():
                raise ConfigError(
                    f"{self}: the user or password before it has a '/', '?' or '#'; write these as %2F, %3F and %23"
                )

    def _secrets(self) -> list[str]:
        found = set(_leaves(self.options))
        for part in _chained(self.target):
            _, userinfo, rest = _parted(part)
            found |= {*re.split("[:@/?#]", userinfo), *userinfo.split(":", 1), userinfo}
            after = rest[len(_before_query(part, rest)) :]
            found |= {after, after[1:], *re.split("[?#&=]|::", after)}
        return sorted((s for s in found if len(s) >= _MIN_SECRET), key=len, reverse=True)


def _hidden(target: str) -> str:
    """Return a whole URL's public text; unlike in messages, spaces and quotes do not end it."""
    return "::".join(map(_hidden_part, _chained(target)))


def _hidden_part(part: str) -> str:
    scheme, _, rest = _parted(part)
    kept = _before_query(part, rest)
    return f"{scheme}{kept}{rest[len(kept)]}{_HIDDEN}" if len(kept) < len(rest) else scheme + rest


def _chained(target: str) -> list[str]:
    """Split a chain into its parts. Addresses and queries may contain ``::`` too, but without a protocol after it."""
    return _CHAIN.split(target)


def _parted(part: str) -> tuple[str, str, str]:
    """Return scheme with ``://``, userinfo with ``@``, and the rest of a possibly malformed URL.

    A password with an unescaped ``/``, ``?``, ``#`` or ``@`` cannot be told from a path. Where there are signs of one,
    all up to the last ``@`` is taken for it: rather a path that shows too little than half a password.
    """
    scheme, mark, rest = part.partition("://")
    authority = re.split("[/?#]", rest, maxsplit=1)[0]
    secret = "@" in authority or (":" in authority and not _HOST_AND_PORT.fullmatch(authority))
    end = rest.rfind("@") + 1 if secret else 0
    return scheme + mark, rest[:end], rest[end:]


def _before_query(part: str, rest: str) -> str:
    marks = "[?]" if part.startswith(tuple(f"{name}:" for name in _KEYED)) else "[?#]"
    return re.split(marks, rest, maxsplit=1)[0] if "://" in part else rest


def _split(url: str) -> tuple[str, str]:
    """Split a URL around the place where a key below it is inserted."""
    parts = _chained(str(url))
    at = next(i for i, part in enumerate(parts) if "://" in part)
    path = parts[at]
    if path.startswith(("http://", "https://")):
        scheme, userinfo, after = _parted(path)
        path = scheme + userinfo + _before_query(path, after)
    rest = [parts[at][len(path) :], *parts[at + 1 :]]
    return "::".join([*parts[:at], path]), "::".join(rest)


def _joined(url: str, key: str) -> str:
    before, after = _split(url)
    return f"{before}{key}{after}" if before.endswith("://") else f"{before.rstrip('/')}/{key}{after}"


def _named(options: Mapping[str, object]) -> Iterator[tuple[str, str]]:
    """Yield all options with names, nested ones too."""
    for name, value in options.items():
        if isinstance(value, Mapping):
            yield from _named(value)
        else:
            yield str(name), str(value)


def _leaves(options: object) -> Iterator[str]:
    """Yield all texts in nested options that may be secret."""
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
