"""Calls of tools in OpenAI's shape, whole or as they come.

Knows: their JSON, generation.proto. Does not know: who asked, what is called.
"""

from quill.protos import generation_pb2 as pb
from quill.server.http.openai.generations import finish_reason
from quill.server.service.json_fields import Json


def message_json(sequence: pb.Sequence) -> Json:
    """What the model said: nothing said beside calls is null."""
    message: Json = {"role": "assistant", "content": sequence.text, "refusal": None}
    if sequence.tool_calls:
        message["content"] = sequence.text or None
        message["tool_calls"] = [
            {
                "id": each.id,
                "type": "function",
                "function": {"name": each.name, "arguments": each.arguments},
            }
            for each in sequence.tool_calls
        ]
    return message


def piece_json(piece: pb.ToolCallDelta) -> Json:
    """The first one of a call says which it is; clients expect its arguments from the next on."""
    if not piece.id:
        return {"index": piece.index, "function": {"arguments": piece.arguments}}
    function = {"name": piece.name, "arguments": piece.arguments}
    return {"index": piece.index, "id": piece.id, "type": "function", "function": function}


def reason_with_calls(message: pb.Sequence | pb.GenerateChunk, has_calls: bool) -> str | None:
    """Calls are whole only where the answer ended by itself. What cut it isn't hidden by them."""
    if has_calls and message.finish_reason == pb.FINISH_REASON_EOS:
        return "tool_calls"
    return finish_reason(message)
