"""The headers by which clients and proxies balance calls: `quill-prefix-hash` and `quill-load`.

Knows: generation.proto, the headers' names and forms. Does not know: tokenizers, who balances.

`quill-prefix-hash` is a short hash of the prompt prefix that servers could share: requests with a
shared prefix go to one server, whose prefix cache then has it. Eight digits are enough for that and
don't reveal the text.

`quill-load` is how many requests of all clients a server has, running and waiting. A client that
wants it sends `quill-load: tell`: initial metadata before the first message takes the better part
of a millisecond, and with one server it is of no use. The server sends it with the initial
metadata and again with the trailing metadata. ORCA (`endpoint-load-metrics`) has no field for a
number of requests.
"""

import hashlib
from collections.abc import Iterable

from quill.protos import generation_pb2 as pb

PREFIX_HASH_HEADER = "quill-prefix-hash"
NUM_DIGITS = 8
# A shared prefix that is shorter takes little time to prefill.
NUM_CHARACTERS = 256
NUM_TOKENS = 64
LOAD_HEADER = "quill-load"
MAX_DIGITS = 9
TELL_LOAD = ((LOAD_HEADER, "tell"),)


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


def wants_load(metadata: Iterable[tuple[str, str | bytes]] | None) -> bool:
    return any(header in TELL_LOAD for header in metadata or ())


def write_load(num_requests: int) -> tuple[tuple[str, str]]:
    return ((LOAD_HEADER, str(num_requests)),)


def read_load(metadata: Iterable[tuple[str, str | bytes]] | None) -> int | None:
    """None: it isn't there, or isn't a number."""
    value = next((each for name, each in metadata or () if name == LOAD_HEADER), "")
    is_number = isinstance(value, str) and value.isascii() and value.isdigit()
    return int(value) if is_number and len(value) <= MAX_DIGITS else None
