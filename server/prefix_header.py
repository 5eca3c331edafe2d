"""The header `quill-prefix-hash`: a short hash of the prompt prefix that servers could share.

Knows: generation.proto, the header's name and form. Does not know: tokenizers, who balances.

Clients and proxies that hash the prefix send requests with a shared prefix to one server, whose
prefix cache then has it. Eight digits are enough for that and don't reveal the text.
"""

import hashlib

from quill.protos import generation_pb2 as pb

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
