"""obstore's stores of S3, for reads that they make as s3fs would: a request takes a fifth of the CPU time.

What a store cannot do just as s3fs does with the same options (a proxy, a certificate of one's own, an option that is
not known here) is left to s3fs, silently. So is a store's answer that is not understood. Whole reads from web servers
were no faster by obstore (tests/bench/README.md), nor did they take less CPU time: these are left to fsspec, too.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import errno
import importlib
import os
import re
import sys
import threading
import urllib.request
from collections.abc import Callable, Mapping
from typing import Any

from scidata.core.urls import Version

#: ``False`` leaves all to fsspec; set by tests and benchmarks. Users leave out the extra.
enabled = True

_EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)  # what obstore says of objects without a time
_CREDENTIALS_LAST = datetime.timedelta(minutes=6)  # obstore asks anew five minutes before their end
_WAIT_FOR_CREDENTIALS = 60.0  # seconds
_MAX_STORES = 64
_SILENCE = 15.0  # seconds, after which s3fs gives up, too
_NO_RETRIES: Any = {"max_retries": 0}  # these are left to ``retry``

#: Options of the file systems that mean nothing for a read of a range, and those that are translated.
_IDLE = {"use_listings_cache", "listings_expiry_time", "max_paths", "default_block_size", "default_fill_cache"}
_IDLE |= {"default_cache_type", "block_size", "cache_type", "cache_options", "simple_links", "max_concurrency"}
_OF_S3 = {"key", "secret", "token", "anon", "endpoint_url", "client_kwargs", "config_kwargs", "requester_pays"}

#: Variables that make connections differ: obstore's and the file systems' rules for them are not the same.
_CERTIFICATES = ("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "AWS_CA_BUNDLE")
#: ``AWS_*`` that botocore reads, or neither reads for a store made with all that is given here; obstore reads more.
_OF_BOTOCORE = re.compile(
    "AWS_(ACCESS_KEY_ID|SECRET_ACCESS_KEY|SESSION_TOKEN|SECURITY_TOKEN|(DEFAULT_)?REGION|(DEFAULT_)?PROFILE"
    "|CONFIG_FILE|SHARED_CREDENTIALS_FILE|ENDPOINT_URL(_.*)?|IGNORE_CONFIGURED_ENDPOINT_URLS|EC2_METADATA_.*"
    "|METADATA_SERVICE_.*|ROLE_ARN|ROLE_SESSION_NAME|WEB_IDENTITY_TOKEN_FILE|CONTAINER_.*|DEFAULT_OUTPUT|PAGER"
    "|MAX_ATTEMPTS|RETRY_MODE|DEFAULTS_MODE|STS_REGIONAL_ENDPOINTS|SDK_.*|EXECUTION_ENV|LAMBDA_.*|DATA_PATH"
    "|CREDENTIAL_EXPIRATION|BATCH_.*|ACCOUNT_ID.*|CA_BUNDLE)"
)
_AWS_ITSELF = re.compile(r"https://s3(?:[.-][a-z0-9-]+)?\.amazonaws\.com(?:\.cn)?/?")
_BUCKET = re.compile(r"[a-z0-9][a-z0-9-]{1,61}[a-z0-9]")


class UnservedError(Exception):
    """Says that fsspec has to make a request. ``for_good``: all further ones of this store, too."""

    def __init__(self, *, for_good: bool) -> None:
        super().__init__()
        self.for_good = for_good


class AnswerError(OSError):
    """An answer of a server that is no success."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


def _available() -> bool:
    """Whether obstore is here, and its threads are: they do not survive a fork, and nothing says so but a hang."""
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


class ObjectStores:
    """The stores that serve one of s3fs's file systems: one for each bucket, and time that is given.

    Parameters
    ----------
    fs
        The file system, connected.
    options
        What it was made with.
    """

    def __init__(self, fs: Any, options: Mapping[str, Any]) -> None:
        self._fs, self._options = fs, options
        self._lock = threading.Lock()
        self._made: dict[tuple[str, float, float], Any] = {}
        self._unserved: set[str] = set()
        self._serves = _is_open() and _is_known(options)

    def place(self, path: str) -> tuple[str, str] | None:
        """Return the bucket that a path lies in, and its key there; None where fsspec has to read it."""
        if not self._serves or not _available():
            return None
        found = _place_of(self._fs, path)
        return None if found is None or found[0] in self._unserved else found

    def serves(self, method: str) -> bool:
        """Whether stores answer such requests."""
        return method in ("range", "info")

    def leave(self, name: str) -> None:
        """Leave a bucket to fsspec from now on."""
        self._unserved.add(name)

    def store(self, name: str, seconds: float, to_connect: float) -> Any:
        """Return the store of a bucket in which a request, and a connection, may take so long.

        Raises
        ------
        UnservedError
        """
        key = name, seconds, to_connect
        found = self._made.get(key)
        if found is None:
            with self._lock:
                found = self._made.get(key)
                if found is None:
                    if len(self._made) >= _MAX_STORES:
                        self._made.clear()
                    times: dict[str, Any] = {"timeout": _seconds(seconds), "connect_timeout": _seconds(to_connect)}
                    times["read_timeout"] = _seconds(_SILENCE)
                    client = times | {"allow_http": True}
                    found = self._made[key] = self._make(name, client)
        return found

    def _make(self, bucket: str, client: dict[str, Any]) -> Any:
        """Make a store that asks the same server in the same way as botocore's client, which has read all settings."""
        meta, anonymous = self._fs.s3.meta, bool(self._options.get("anon"))
        found, s3, endpoint = meta.config, meta.config.s3 or {}, meta.endpoint_url.rstrip("/")
        _check_certificates(endpoint)
        differs = found.proxies or found.use_dualstack_endpoint or found.use_fips_endpoint or not meta.region_name
        trusts = endpoint.startswith("https://") and self._fs.session.get_config_variable("ca_bundle")
        if differs or trusts or set(s3) - {"addressing_style"}:
            raise UnservedError(for_good=True)
        credentials = None if anonymous else _credentials(self._fs, self._options)
        if not anonymous and (credentials is None or found.signature_version != "s3v4"):
            raise UnservedError(for_good=True)
        style = s3.get("addressing_style", "auto")
        virtual = style == "virtual" or (style == "auto" and _AWS_ITSELF.fullmatch(endpoint) is not None)
        scheme, _, host = endpoint.partition("://")
        address = f"{scheme}://{bucket}.{host}" if virtual else endpoint
        settings = {  # all that it would take from the environment else
            "endpoint": address,
            "aws_endpoint_url_s3": address,
            "region": meta.region_name,
            "virtual_hosted_style_request": virtual,
            "skip_signature": anonymous,
            "request_payer": bool(self._options.get("requester_pays")),
            "unsigned_payload": False,
            "s3_express": False,
        }
        return _obstore("obstore.store").S3Store(
            bucket, config=settings, client_options=client, retry_config=_NO_RETRIES, credential_provider=credentials
        )


def stores_of(fs: Any, options: Mapping[str, Any]) -> ObjectStores | None:
    """Return the stores that may serve a file system of fsspec; None for a kind that they do not know."""
    is_s3 = (type(fs).__module__, type(fs).__name__) == ("s3fs.core", "S3FileSystem")
    return ObjectStores(fs, options) if is_s3 else None


def _is_open() -> bool:
    """Whether this environment lets obstore connect as botocore does."""
    if urllib.request.getproxies():
        return False
    return all(_OF_BOTOCORE.fullmatch(name) for name in os.environ if name.startswith("AWS_"))


def _check_certificates(address: str) -> None:
    """Leave servers to fsspec that are known by certificates of one's own: its file systems trust no others then."""
    if not address.startswith("http://") and any(map(os.environ.get, _CERTIFICATES)):
        raise UnservedError(for_good=True)


def _seconds(number: float) -> datetime.timedelta:
    return datetime.timedelta(seconds=number)


def _is_odd(key: str) -> bool:
    """Whether a key has parts that obstore refuses, or that clients leave out."""
    return any(part in ("", ".", "..") for part in key.split("/"))


def _place_of(fs: Any, path: str) -> tuple[str, str] | None:
    bucket, key, version = fs.split_path(path)
    if version or "?" in path or not key.isprintable() or _is_odd(key) or not _BUCKET.fullmatch(bucket):
        return None
    return bucket, key


def _is_known(options: Mapping[str, Any]) -> bool:
    of_client, config = dict(options.get("client_kwargs") or {}), dict(options.get("config_kwargs") or {})
    s3 = config.pop("s3", None) or {}
    return not (
        set(options) - _OF_S3 - _IDLE
        or set(of_client) - {"region_name", "endpoint_url"}
        or set(config) - {"signature_version"}
        or set(s3) - {"addressing_style"}
    )


def _credentials(fs: Any, options: Mapping[str, Any]) -> Callable[[], dict[str, Any]] | None:
    """Return what gives a store its credentials: those of the options, or what botocore finds where none are given."""
    given = {name: options.get(name) for name in ("key", "secret", "token")}
    if given["key"] and given["secret"]:
        lasting = {"access_key_id": given["key"], "secret_access_key": given["secret"], "token": given["token"]}
        return lambda: lasting | {"expires_at": None}
    if any(given.values()):
        return None

    def ask(coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, fs.loop).result(_WAIT_FOR_CREDENTIALS)

    found = ask(fs.session.get_credentials())

    def current() -> dict[str, Any]:
        frozen = ask(found.get_frozen_credentials())  # which renews them
        expires = datetime.datetime.now(datetime.UTC) + _CREDENTIALS_LAST
        secret = {"access_key_id": frozen.access_key, "secret_access_key": frozen.secret_key, "token": frozen.token}
        return secret | {"expires_at": expires}

    return None if found is None else current


def read(store: Any, key: str, offset: int, nbytes: int, version: str | None) -> tuple[Any, Version]:
    """Read a range of an object; return it as a buffer, and of which version of the object it is.

    Raises
    ------
    AnswerError, OSError
        By obstore's own, whose texts hold addresses with all that is in them.
    UnservedError
        fsspec may do better, and will say what is wrong.
    """
    options: dict[str, Any] = {"range": (offset, offset + nbytes)}
    if version is not None:
        options["version"] = version
    with _translated():
        answer = _obstore().get(store, key, options=options)
        encoding = answer.attributes.get("Content-Encoding", "identity")
        return memoryview(answer.bytes()), _version(answer.meta, encoded=encoding not in ("", "identity"))


def head(store: Any, key: str) -> dict[str, Any]:
    """Return what fsspec's ``info`` says of an object; raises as :func:`read`."""
    with _translated():
        found = _version(_obstore().head(store, key))
    names = {"ETag": found.etag, "VersionId": found.version, "LastModified": found.modified}
    return {"name": key, "type": "file", "size": found.size} | {name: text for name, text in names.items() if text}


def _version(meta: Mapping[str, Any], *, encoded: bool = False) -> Version:
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
#: What is passed on to ``retry`` and the user as it is; other answers (redirects, requests that the server does not
#: understand) have reasons that fsspec's file systems know to deal with.
_PLAIN = {401, 403, 404, 407, 408, 410, 416, 425, 429}


@contextlib.contextmanager
def _translated() -> Any:
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
        if number in _PLAIN or number >= 500:
            code = _SAID.search(said)
            reason = "" if code is None else f": {code[1]}" + (f", {code[2]}" if code[2] else "")
            return AnswerError(number, f"the server answered {number}{reason}")
        return UnservedError(for_good=300 <= number < 400)
    if kind is not None and kind[1] == "Timeout":
        return TimeoutError()
    if kind is not None and kind[1] in ("Interrupted", "Request"):
        return ConnectionResetError(errno.ECONNRESET, "the connection was closed before the whole answer came")
    cause = _REASON.search(said) if kind is not None and kind[1] == "Connect" else None
    if cause is not None:
        number = int(cause[1]) if cause[1] else errno.EHOSTUNREACH
        return OSError(number, f"Cannot connect: {cause[2] or cause[3]}")
    return UnservedError(for_good=True)  # no ranges, no Content-Length, a certificate that is not trusted, ...
