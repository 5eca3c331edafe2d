"""Says whose API key a call came with.

Knows: headers, hashes, revocation. Does not know: gRPC, HTTP, what a caller may do.
"""

import hmac
from collections.abc import Sequence
from pathlib import Path

from quill.server.auth.caller import Caller
from quill.server.auth.key_file import ApiKey, digest, read_keys
from quill.server.auth.watched_file import Watched
from quill.server.errors import RevokedError, UnauthenticatedError

MAX_SECRET = 512  # characters; ours have 49


class Keyring:
    """The keys of a file, as they are now. May be asked from any thread."""

    def __init__(self, path: Path) -> None:
        self._keys = Watched([path], lambda: read_keys(path))

    def identify(self, headers: Sequence[str]) -> Caller:
        """`headers`: all values of `authorization`."""
        found = _find(self._keys.get(), digest(_secret(headers)))
        if found is None:
            raise UnauthenticatedError("this API key isn't known here")
        if found.revoked:
            raise RevokedError(f"the API key {found.name} was revoked. Ask for a new one")
        return Caller(
            name=found.name,
            requests_per_minute=found.requests_per_minute,
            max_concurrent=found.max_concurrent,
            tokens_per_minute=found.tokens_per_minute,
            max_prompt_tokens=found.max_prompt_tokens,
            admin=found.admin,
        )


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
