"""API keys: a file of hashes, and whose key a call came with.

Knows: the file's format, headers, revocation. Does not know: gRPC, HTTP, how limits work.

A key is 32 random bytes. Nobody guesses one, however fast a hash is, so a plain SHA-256 is as good
as a slow hash here, and costs a call microseconds.
"""

import fcntl
import hashlib
import hmac
import json
import os
import re
import secrets
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from quill.server.auth.caller import Caller
from quill.server.auth.watched_file import Watched
from quill.server.errors import RevokedError, ServerError, UnauthenticatedError

FORMAT = 1
MAX_SECRET = 512  # characters; ours have 49
LIMITS = ("requests_per_minute", "max_concurrent", "tokens_per_minute", "max_prompt_tokens")
_PREFIX = "quill-"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_SHA256 = re.compile(r"[0-9a-f]{64}")


class KeysError(ServerError):
    """A file of API keys that can't be read, or a change to it that makes no sense."""


@dataclass(frozen=True, kw_only=True)
class ApiKey:
    """Names are for logs; they are never given twice, not even after a revocation."""

    name: str
    sha256: str
    created: str = ""
    revoked: str | None = None
    requests_per_minute: int | None = None  # None: no limit
    max_concurrent: int | None = None
    tokens_per_minute: int | None = None
    max_prompt_tokens: int | None = None
    admin: bool = False  # may reload the bundle

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            rule = "it must have 1 to 64 letters, digits, dots, dashes or underscores"
            raise KeysError(f"{self.name!r} can't be a key's name; {rule}")
        if not _SHA256.fullmatch(self.sha256):
            raise KeysError(f"the sha256 of key {self.name} isn't 64 hexadecimal digits")
        for limit in LIMITS:
            value = getattr(self, limit)
            if value is not None and (type(value) is not int or value < 1):
                raise KeysError(f"{limit} of key {self.name} is {value!r}; it must be at least 1")
        if not isinstance(self.admin, bool):
            raise KeysError(f"admin of key {self.name} is {self.admin!r}; it must be true or false")
        if not isinstance(self.revoked, str | None):
            raise KeysError(f"revoked of key {self.name} is {self.revoked!r}; it must be a date")


def digest(secret: str) -> str:
    return hashlib.sha256(secret.encode("utf-8", "replace")).hexdigest()


def read_keys(path: Path) -> tuple[ApiKey, ...]:
    try:
        if path.exists() and not path.is_file():  # a pipe would be waited for
            raise KeysError(f"{path} isn't a file")
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        hint = "`quill keys add` makes one"
        raise KeysError(f"can't read the keys in {path}: {error.strerror}; {hint}") from error
    except (ValueError, RecursionError) as error:
        raise KeysError(f"{path} isn't JSON in UTF-8: {error}") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise KeysError(f"{path} isn't a file of keys in format {FORMAT}")
    entries = content.get("keys")
    if not isinstance(entries, list) or not all(isinstance(each, dict) for each in entries):
        raise KeysError(f"{path} has no list of keys")
    keys = tuple(_read_key(each, path) for each in entries)
    if len({key.name for key in keys}) < len(keys):
        raise KeysError(f"{path} has two keys of the same name")
    return keys


def _read_key(entry: dict[str, Any], path: Path) -> ApiKey:
    unknown = set(entry) - {each.name for each in fields(ApiKey)}
    if unknown:
        raise KeysError(f"{path} has unknown fields: {', '.join(sorted(unknown))}")
    texts = (entry.get("name"), entry.get("sha256"), entry.get("created", ""))
    if not all(isinstance(each, str) for each in texts):
        raise KeysError(f"{path} has a key whose name, sha256 or date isn't a text")
    return ApiKey(**entry)


def add_key(path: Path, name: str, **limits: Any) -> str:
    """The new key itself, which is kept nowhere."""
    secret = _PREFIX + secrets.token_urlsafe(32)
    new = ApiKey(name=name, sha256=digest(secret), created=_now(), **limits)

    def add(keys: tuple[ApiKey, ...]) -> tuple[ApiKey, ...]:
        if any(key.name == name for key in keys):
            raise KeysError(f"{path} has a key named {name} already. Give the new one another name")
        return (*keys, new)

    _change(path, add)
    return secret


def revoke_key(path: Path, name: str) -> None:
    def revoke(keys: tuple[ApiKey, ...]) -> tuple[ApiKey, ...]:
        if all(key.name != name for key in keys):
            known = ", ".join(key.name for key in keys) or "none"
            raise KeysError(f"{path} has no key named {name}; there are: {known}")
        return tuple(_revoked(key) if key.name == name else key for key in keys)

    read_keys(path)  # one that isn't there isn't made
    _change(path, revoke)


def _revoked(key: ApiKey) -> ApiKey:
    return ApiKey(**{**asdict(key), "revoked": key.revoked or _now()})


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _change(path: Path, change: Callable[[tuple[ApiKey, ...]], tuple[ApiKey, ...]]) -> None:
    path = path.resolve()  # what a link leads to is changed, not the link
    try:
        with _locked(path.parent):
            keys = change(read_keys(path) if path.exists() else ())
            content = {"format": FORMAT, "keys": [asdict(key) for key in keys]}
            _replace(path, json.dumps(content, indent=1) + "\n")
    except OSError as error:
        raise KeysError(f"can't write {path}: {error.strerror}") from error


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Two that add at once come one after the other."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _replace(path: Path, text: str) -> None:
    """Whole or as before. A file that others may read stays so."""
    handle, name = tempfile.mkstemp(dir=path.absolute().parent, prefix=f".{path.name}.")  # 0600
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            if path.exists():
                before = path.stat()
                os.fchmod(file.fileno(), before.st_mode & 0o777)
                if (before.st_uid, before.st_gid) != (os.geteuid(), os.getegid()):
                    os.fchown(file.fileno(), before.st_uid, before.st_gid)
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


class Keyring:
    """The keys of a file, as they are now. Any thread may call it."""

    def __init__(self, path: Path) -> None:
        self._keys = Watched([path], lambda: read_keys(path))

    def identify(self, headers: Sequence[str]) -> Caller:
        """`headers`: all values of `authorization`."""
        found = _find(self._keys.get(), digest(_secret(headers)))
        if found is None:
            raise UnauthenticatedError("this API key isn't known here")
        if found.revoked:
            raise RevokedError(f"the API key {found.name} was revoked. Ask for a new one")
        return Caller(**{each.name: getattr(found, each.name) for each in fields(Caller)})


def _secret(headers: Sequence[str]) -> str:
    scheme, _, secret = (headers[0] if len(headers) == 1 else "").partition(" ")
    if scheme.lower() != "bearer" or not 0 < len(secret) <= MAX_SECRET:
        raise UnauthenticatedError(
            "this server wants an API key: give Quill's commands --api-key-file, or send the "
            "header `authorization: Bearer KEY`, once"
        )
    return secret


def _find(keys: Sequence[ApiKey], sha256: str) -> ApiKey | None:
    """Looks at all keys in full, so that the time it takes says nothing about any."""
    found = None
    for key in keys:
        if hmac.compare_digest(key.sha256, sha256):
            found = key
    return found
