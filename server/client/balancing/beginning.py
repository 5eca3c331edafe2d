"""What a request begins with, as far as servers would share it.

Knows: generation.proto. Does not know: servers, tokenizers.
Servers keep what they have read, and find it again by a prompt's beginning. Of a conversation that
is its first message: the system prompt, or what stays the same from turn to turn.
"""

from quill.protos import generation_pb2 as pb

# What is shared and shorter than this is quickly read.
NUM_CHARACTERS = 256
NUM_TOKENS = 64


def beginning(request: pb.GenerateRequest) -> bytes | None:
    """None: it begins with nothing."""
    match request.WhichOneof("input"):
        case "messages" if request.messages.messages:
            first = request.messages.messages[0]
            return f"{first.role}\n{first.content}".encode()
        case "prompt" if request.prompt:
            return request.prompt[:NUM_CHARACTERS].encode()
        case "prompt_ids" if request.prompt_ids.ids:
            return repr(list(request.prompt_ids.ids[:NUM_TOKENS])).encode()
    return None
