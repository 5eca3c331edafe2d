"""Quill's own gRPC headers: a server's load, and the hash of a prompt's prefix.

Knows: names and forms of the headers. Does not know: who counts, who routes.

`quill-load`: how many requests the server has, running and waiting. It comes with the headers of an
answer and again with the trailers, to clients that send `quill-load: tell`: headers before the
first message take the better part of a millisecond, and with one server nobody needs them. ORCA
(`endpoint-load-metrics`) has no field for requests.
`quill-prefix-hash`: a hash of the prompt's prefix. Clients and proxies that send requests with a
shared prefix to one server find it in that server's prefix cache. Eight digits are enough for that
and don't reveal the text.
"""

import hashlib
from collections.abc import Iterable

from quill.protos import generation_pb2 as pb

LOAD_HEADER = "quill-load"
MAX_DIGITS = 9
TELL_LOAD = ((LOAD_HEADER, "tell"),)


def wants_load(metadata: Iterable[tuple[str, str | bytes]] | None) -> bool:
    return any(header in TELL_LOAD for header in metadata or ())


def write_load(num_requests: int) -> tuple[tuple[str, str]]:
    return ((LOAD_HEADER, str(num_requests)),)


def read_load(metadata: Iterable[tuple[str, str | bytes]] | None) -> int | None:
    """None: nothing is said, or nothing that can be read."""
    told = next((value for name, value in metadata or () if name == LOAD_HEADER), "")
    is_number = isinstance(told, str) and told.isascii() and told.isdigit()
    return int(told) if is_number and len(told) <= MAX_DIGITS else None


PREFIX_HASH_HEADER = "quill-prefix-hash"
NUM_DIGITS = 8
# A shared prefix that is shorter takes little time to prefill.
NUM_CHARACTERS = 256
NUM_TOKENS = 64


def prefix_key(request: pb.GenerateRequest) -> bytes | None:
    """Of a conversation: its tools and its first message, which is the system prompt or stays the
    same from turn to turn. None: the request has no prompt."""
    match request.WhichOneof("input"):
        case "messages" if request.messages.messages:
            first = request.messages.messages[0]
            tools = (tool.SerializeToString(deterministic=True) for tool in request.tools)
            return b"\n".join((first.role.encode(), first.content.encode(), *tools))
        case "prompt" if request.prompt:
            return request.prompt[:NUM_CHARACTERS].encode()
        case "prompt_ids" if request.prompt_ids.ids:
            return repr(list(request.prompt_ids.ids[:NUM_TOKENS])).encode()
    return None


def write_prefix_hash(key: bytes | None) -> tuple[tuple[str, str], ...]:
    if key is None:
        return ()
    return ((PREFIX_HASH_HEADER, hashlib.sha256(key).hexdigest()[:NUM_DIGITS]),)
