"""How a client tells a proxy what its request begins with: a header of gRPC that is a short hash.

Knows: the header's name and form. Does not know: what a beginning is, who balances.

A proxy that hashes it sends requests that begin alike to one server, whose cache has their
beginning. Eight digits are enough for that, and tell nobody the text.
"""

import hashlib

BEGINNING_HEADER = "quill-prefix-hash"
NUM_DIGITS = 8


def write_prefix_hash(key: bytes | None) -> tuple[tuple[str, str], ...]:
    """None: it begins with nothing."""
    if key is None:
        return ()
    return ((BEGINNING_HEADER, hashlib.sha256(key).hexdigest()[:NUM_DIGITS]),)
