"""A request's options by the names that OpenAI and vLLM gave them.

Knows: generation.proto, those names. Does not know: wires, prompts.
"""

from typing import Any

from quill.protos import generation_pb2 as pb

# Those that another name is usual for; all others have their own.
_NAMES = {
    "max_new_tokens": "max_tokens",
    "num_sequences": "n",
    "min_new_tokens": "min_tokens",
    "constraint": "structured_outputs",
}
_EARLY_STOPPING = {pb.EARLY_STOPPING_AT_ONCE: True, pb.EARLY_STOPPING_NEVER: "never"}
_INPUTS = ("prompt", "prompt_ids", "messages")
_FORMS = {"json_schema": "json", "lark": "grammar"}  # of the constraint, in the same way


def options_json(request: pb.GenerateRequest) -> dict[str, Any]:
    """What is set, and nothing else."""
    options: dict[str, Any] = {}
    for field, value in request.ListFields():
        if field.name not in _INPUTS:
            options[_NAMES.get(field.name, field.name)] = _value(field.name, value)
    return options


def _value(name: str, value: Any) -> Any:
    match name:
        case "priority":
            return -value  # theirs: lower goes first
        case "early_stopping":
            return _EARLY_STOPPING[value]
        case "logit_bias":
            return {str(token): bias for token, bias in value.items()}
        case "stop" | "stop_token_ids":
            return list(value)
        case "constraint":
            return _form_json(value)
    return value


def _form_json(constraint: pb.Constraint) -> dict[str, Any]:
    kind = constraint.WhichOneof("kind")
    if kind is None:
        return {}
    value = list(constraint.choice.choices) if kind == "choice" else getattr(constraint, kind)
    return {_FORMS.get(kind, kind): value}


def messages_json(request: pb.GenerateRequest) -> list[dict[str, str]]:
    return [{"role": each.role, "content": each.content} for each in request.messages.messages]
