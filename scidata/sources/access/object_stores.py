"""Objects of S3, Google Cloud Storage and Azure, read by obstore.

The options are those of fsspec's file systems (s3fs, gcsfs, adlfs). A URL with an option that has no counterpart here,
and a server whose answer obstore does not understand, are left to fsspec.
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import functools
import importlib
import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from scidata.core.cache import Cache
from scidata.core.urls import Url, Version
from scidata.sources.access.answers import Info, check_document

if TYPE_CHECKING:
    from obstore import ObjectMeta
    from obstore.store import ClientConfig, ObjectStore, RetryConfig, S3Credential

#: ``False`` leaves everything to fsspec; set by tests and benchmarks. Users leave out the extra.
enabled = True

MAX_LISTED = 1000  # objects of one listing; no server gives more
_EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)  # obstore's time of objects whose server tells none
_CREDENTIALS_LAST = datetime.timedelta(minutes=6)  # obstore asks anew five minutes before their end
_MAX_STORES = 64
_SILENCE = 15.0  # seconds without a byte, after which a request is given up
_NO_RETRIES: RetryConfig = {"max_retries": 0}  # ``retry`` does that

_Options: TypeAlias = Mapping[str, Any]
#: From a first byte to one after the last; the last bytes; None: all.
Span: TypeAlias = tuple[int, int] | Mapping[str, int] | None
#: Makes a store with these limits of time.
_Make: TypeAlias = Callable[["ClientConfig"], "ObjectStore"]

#: Options of fsspec's file systems that mean nothing for a read of a range.
_IDLE = {"use_listings_cache", "listings_expiry_time", "max_paths", "default_block_size", "default_fill_cache"}
_IDLE |= {"default_cache_type", "block_size", "cache_type", "cache_options", "simple_links", "max_concurrency"}
_NAME = re.compile(r"[\w.-]+(@[\w.-]+)?")
_AWS_ITSELF = re.compile(r"https://s3(?:[.-][a-z0-9-]+)?\.amazonaws\.com(?:\.cn)?/?")


class UnservedError(Exception):
    """Says that fsspec has to make a request. ``for_good``: all further ones to this bucket, too."""

    def __init__(self, said: str, *, for_good: bool) -> None:
        super().__init__(said)
        self.for_good = for_good


class AnswerError(OSError):
    """An answer of a server that is no success."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


def is_available() -> bool:
    """Return True if obstore is installed, and its threads run: they do not survive a fork, and requests would hang."""
    if not enabled or _forked:
        return False
    try:
        _obstore()
    except ImportError:
        return False
    return True


def _obstore(name: str = "obstore") -> Any:
    return importlib.import_module(name)


_forked = False


def _after_fork() -> None:
    global _forked  # noqa: PLW0603 - of the process, as obstore's threads are
    _forked = _forked or "obstore" in sys.modules


os.register_at_fork(after_in_child=_after_fork)


class Bucket:
    """A bucket, with one store of obstore for each limit of time: a store's limits are fixed."""

    def __init__(self, settle: Callable[[], _Make]) -> None:
        self._settle = settle
        self._settled: Cache[_Make] = Cache(1)
        self._made: Cache[ObjectStore] = Cache(_MAX_STORES)
        self.is_served = True

    def prepare(self) -> _Make:
        """Find out, once, how the bucket's server is asked: credentials, region, address. Raises UnservedError."""
        return self._settled.get_or_make("settled", self._settle, once=True)

    def store(self, seconds: float, to_connect: float) -> ObjectStore:
        """Return the store in which a request, and a connection, may take so long."""

        def make() -> ObjectStore:
            times = [datetime.timedelta(seconds=each) for each in (seconds, to_connect, _SILENCE)]
            client = dict(zip(("timeout", "connect_timeout", "read_timeout"), times, strict=True))
            return self.prepare()({"allow_http": True, **client})  # type: ignore[typeddict-item]

        return self._made.get_or_make((seconds, to_connect), make, once=True)


def find(url: Url, buckets: dict[str, Bucket]) -> tuple[Bucket, str] | None:
    """Return the bucket that an object lies in, known or new, and its key; None if fsspec has to read it."""
    scheme, _, rest = url.target.partition("://")
    make = _MAKERS.get(scheme)
    if make is None or not is_available():
        return None
    name, _, key = rest.partition("/")
    if "?" in rest or not _NAME.fullmatch(name) or ("@" in name and make is not _azure) or _is_odd(key):
        return None
    known = f"{scheme}://{name} {url.options!r}"
    found = buckets.get(known)
    if found is None:
        options = {name: value for name, value in url.options.items() if name not in _IDLE and name != "targets"}
        found = buckets.setdefault(known, Bucket(functools.partial(make, name, options)))
    return (found, key) if found.is_served else None


def _is_odd(key: str) -> bool:
    return not key.isprintable() or any(part in ("", ".", "..") for part in key.split("/") if key)


def _check_options(options: _Options, *known: str) -> None:
    """Leave a bucket to fsspec whose options have no counterpart. Raises UnservedError."""
    unknown = sorted(set(options) - set(known))
    if unknown:
        raise UnservedError(f"obstore knows no storage_options {', '.join(unknown)}", for_good=True)


def _s3(bucket: str, options: _Options) -> _Make:
    """Make stores that ask the server that botocore would ask, with the credentials and region that it finds."""
    of_client, config = dict(options.get("client_kwargs") or {}), dict(options.get("config_kwargs") or {})
    of_s3 = dict(config.get("s3") or {})
    style = of_s3.get("addressing_style", "auto")
    given = ("key", "secret", "token", "anon", "endpoint_url", "requester_pays", "client_kwargs", "config_kwargs")
    _check_options(options, *given)
    _check_options(of_client, "region_name", "endpoint_url")
    _check_options(config, "signature_version", "s3")
    _check_options(of_s3, "addressing_style")
    try:
        botocore = _obstore("botocore.session")
    except ImportError as e:
        raise UnservedError(f"{e}: it finds credentials and regions", for_good=True) from None
    endpoint = options.get("endpoint_url") or of_client.get("endpoint_url")
    session, anonymous = botocore.Session(), bool(options.get("anon"))
    made = session.create_client(
        "s3",
        region_name=of_client.get("region_name"),
        endpoint_url=endpoint,
        aws_access_key_id=options.get("key"),
        aws_secret_access_key=options.get("secret"),
        aws_session_token=options.get("token"),
        config=_obstore("botocore.config").Config(**config),
    )
    found, address = made.meta.config, made.meta.endpoint_url.rstrip("/")
    credentials = None if anonymous else _credentials(session, options)
    if not anonymous and credentials is None:
        raise UnservedError("no credentials were found; public buckets are read with {'anon': True}", for_good=True)
    signs = anonymous or found.signature_version == "s3v4"
    if not signs or found.proxies or set(found.s3 or {}) - {"addressing_style"} or not made.meta.region_name:
        raise UnservedError("obstore signs no such requests, or knows no such endpoint", for_good=True)
    if found.use_dualstack_endpoint or found.use_fips_endpoint:
        raise UnservedError("obstore knows no such endpoint", for_good=True)
    virtual = style == "virtual" or (style == "auto" and "." not in bucket and bool(_AWS_ITSELF.fullmatch(address)))
    if virtual:
        scheme, _, host = address.partition("://")
        address = f"{scheme}://{bucket}.{host}"
    bundle = session.get_config_variable("ca_bundle")
    settings = {  # all that obstore would take from the environment else
        "endpoint": address,
        "aws_endpoint_url_s3": address,
        "region": made.meta.region_name,
        "virtual_hosted_style_request": virtual,
        "skip_signature": anonymous,
        "request_payer": bool(options.get("requester_pays")),
        "unsigned_payload": False,
        "s3_express": False,
    }
    more = {"credential_provider": credentials}
    return functools.partial(_store, "S3Store", bucket, settings, _content(bundle) if bundle else None, more)


def _credentials(session: Any, options: _Options) -> Callable[[], S3Credential] | None:
    """Return a function that gives a store its credentials: those of the options, else those that botocore finds."""
    key, secret, token = (options.get(name) for name in ("key", "secret", "token"))
    if key and secret:
        return lambda: {"access_key_id": key, "secret_access_key": secret, "token": token, "expires_at": None}
    found = None if key or secret or token else session.get_credentials()
    if found is None:
        return None

    def current() -> S3Credential:
        frozen = found.get_frozen_credentials()  # which renews them
        expires = datetime.datetime.now(datetime.UTC) + _CREDENTIALS_LAST
        secret = {"access_key_id": frozen.access_key, "secret_access_key": frozen.secret_key, "token": frozen.token}
        return secret | {"expires_at": expires}  # type: ignore[return-value]

    return current


def _gcs(bucket: str, options: _Options) -> _Make:
    """Make stores of Google Cloud Storage; the default credentials are those of Google's own libraries."""
    _check_options(options, "token", "project", "endpoint_url", "access")
    token, settings = options.get("token"), {"base_url": options.get("endpoint_url")}
    if token == "anon":
        settings["skip_signature"] = True
    elif isinstance(token, Mapping) and token.get("type") == "service_account":
        settings["service_account_key"] = json.dumps(dict(token))
    elif isinstance(token, str) and os.path.isfile(token):
        settings["application_credentials"] = token
    elif token not in (None, "google_default", "cloud"):
        raise UnservedError("obstore knows no such token", for_good=True)
    return functools.partial(_store, "GCSStore", bucket, settings, None, {})


def _azure(name: str, options: _Options) -> _Make:
    """Make stores of a container of Azure: ``container`` or ``container@account.dfs.core.windows.net``."""
    known = ("account_name", "account_key", "sas_token", "tenant_id", "client_id", "client_secret", "anon")
    _check_options(options, *known)
    container, _, host = name.partition("@")
    settings = {name: options.get(name) for name in known}
    settings["account_name"] = host.partition(".")[0] or settings["account_name"]
    settings["sas_key"], settings["skip_signature"] = settings.pop("sas_token"), settings.pop("anon")
    return functools.partial(_store, "AzureStore", container, settings, None, {})


def _store(
    kind: str, bucket: str, settings: _Options, certificates: str | None, more: _Options, client: ClientConfig
) -> ObjectStore:
    if certificates is not None:
        client["root_certificate"] = certificates
    known = {name: value for name, value in settings.items() if value is not None}
    return getattr(_obstore("obstore.store"), kind)(
        bucket, config=known, client_options=client, retry_config=_NO_RETRIES, **more
    )


def _content(path: str) -> str:
    with open(path, encoding="ascii", errors="replace") as file:
        return file.read()


#: What settles how the buckets of a scheme are asked.
_MAKERS: dict[str, Callable[[str, _Options], _Make]]
_MAKERS = {"s3": _s3, "s3a": _s3, "gs": _gcs, "gcs": _gcs, "az": _azure, "abfs": _azure, "abfss": _azure}


# -- requests ----------------------------------------------------------------------------------------------------------


def read(
    store: ObjectStore, key: str, span: Span, version: str | None, most: int, name: str
) -> tuple[memoryview, Version]:
    """Read an object, or a span of it.


    Returns the bytes, and the version of the object that they are of. Raises AnswerError, OSError,
    UnsupportedFormatError; UnservedError: fsspec may succeed, or raise the reason.
    """
    options: dict[str, Any] = {} if span is None else {"range": span}
    if version is not None:
        options["version"] = version
    with _translated():
        answer = _obstore().get(store, key, options=options)
        if span is None:
            check_document(name, answer.meta["size"], most)
        encoding = answer.attributes.get("Content-Encoding", "identity")
        return memoryview(answer.bytes()), _version(answer.meta, encoded=encoding not in ("", "identity"))


def info(store: ObjectStore, key: str) -> Info:
    """Return the size and version of an object, or that it is a folder; raises as :func:`read`, FileNotFoundError."""
    found: Version | None = None
    below: Sequence[ObjectMeta] = []
    with _translated():
        with contextlib.suppress(FileNotFoundError):
            found = _version(_obstore().head(store, key)) if key else None
        if found is None:
            below = next(iter(_obstore().list(store, key or None, chunk_size=1)), [])
    if found is None and not below:
        raise FileNotFoundError(key)
    if found is None:
        return {"name": key, "type": "directory", "size": 0}
    names = {"ETag": found.etag, "VersionId": found.version, "LastModified": found.modified}
    said = {name: text for name, text in names.items() if text}
    return {"name": key, "type": "file", "size": found.size, **said}  # type: ignore[typeddict-item]


def ls(store: ObjectStore, key: str) -> list[Info]:
    """List a folder; raises as :func:`read`."""
    with _translated():
        found = _obstore().list_with_delimiter(store, key or None)
    folders: list[Info] = [{"name": name, "type": "directory", "size": 0} for name in found["common_prefixes"]]
    return folders + [{"name": each["path"], "type": "file", "size": each["size"]} for each in found["objects"]]


def page(store: ObjectStore, key: str, after: str) -> tuple[dict[str, Version], bool]:
    """List objects by key in a folder, in order, after a key, and whether they are the last; raises as :func:`read`."""
    start = f"{key}/" if key else ""
    with _translated():
        listed = _obstore().list(store, key or None, offset=start + after or None, chunk_size=MAX_LISTED)
        found: list[ObjectMeta] = next(iter(listed), [])
    return {each["path"].removeprefix(start): _version(each) for each in found}, len(found) < MAX_LISTED


def _version(meta: ObjectMeta, *, encoded: bool = False) -> Version:
    modified = meta["last_modified"]
    return Version(
        size=None if encoded else meta["size"],
        etag=(meta["e_tag"] or "").removeprefix("W/") or None,
        version=meta["version"],
        modified=None if modified == _EPOCH else str(modified),  # as s3fs's
    )


_STATUS = re.compile(r"inner: Status \{\s*status: (\d{3})")
_SAID = re.compile(r"<Code>([\w.-]+)</Code>\s*(?:<Message>([^<]{0,200})</Message>)?")
_KIND = re.compile(r"HttpError \{\s*kind: (\w+)")
_REASON = re.compile(r'Os \{\s*code: (\d+).*?message: "([^"]+)"|"dns error",.*?error: "([^"]+)"', re.DOTALL)
#: Passed on to ``retry`` and the user as they are; other answers (redirects, requests that the server does not
#: understand) have reasons that fsspec's file systems know to deal with.
_PLAIN = {401, 403, 404, 407, 408, 410, 416, 425, 429}


@contextlib.contextmanager
def _translated() -> Iterator[None]:
    """Raise obstore's errors as others, without their texts, which hold addresses with all that is in them."""
    try:
        yield
        return
    except Exception as e:
        if not type(e).__module__.startswith("obstore") and not isinstance(e, FileNotFoundError | PermissionError):
            raise
        said = str(e)
    raise _translation(said)  # outside of the handler: the original shows addresses and headers


def _translation(said: str) -> Exception:
    status, kind = _STATUS.search(said), _KIND.search(said)
    if status is not None:
        number = int(status[1])
        code = _SAID.search(said)
        reason = "" if code is None else f": {code[1]}" + (f", {code[2]}" if code[2] else "")
        text = f"the server answered {number}{reason}"
        if number in _PLAIN or number >= 500:
            return AnswerError(number, text)
        return UnservedError(text, for_good=300 <= number < 400)
    if kind is not None and kind[1] == "Timeout":
        return TimeoutError()
    if kind is not None and kind[1] in ("Interrupted", "Request"):
        return ConnectionResetError(errno.ECONNRESET, "the connection was closed before the whole answer came")
    cause = _REASON.search(said) if kind is not None and kind[1] == "Connect" else None
    if cause is not None:
        number = int(cause[1]) if cause[1] else errno.EHOSTUNREACH
        return OSError(number, f"Cannot connect: {cause[2] or cause[3]}")
    # no ranges, no Content-Length, a certificate that is not trusted, ...
    return UnservedError("obstore does not understand the answer", for_good=True)
