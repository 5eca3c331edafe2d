"""The options of a generation by the names that OpenAI's and vLLM's users know, as one table.

Knows: their names and meanings, generation.proto's. Does not know: doors, what is continued.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from google.protobuf.message import Message

from quill.protos import generation_pb2 as pb
from quill.server.errors import InvalidFieldError
from quill.server.service.constraint_options import CONSTRAINTS
from quill.server.service.json_fields import (
    BOOLEAN,
    INTEGER,
    INTEGERS,
    NUMBER,
    OBJECT,
    STRINGS,
    Field,
    Json,
    Kind,
    Refused,
    refuse,
)
from quill.server.service.tool_options import as_nested


def _bias(name: str, value: Any) -> dict[int, float]:
    """JSON's keys are strings."""
    bias = {}
    for token, number in OBJECT.read(name, value).items():
        if not token.isdecimal() or len(token) > 9:
            raise InvalidFieldError(name, "has a key that isn't a token's id, such as \"42\"")
        bias[int(token)] = NUMBER.read(name, number)
    return bias


def _early_stopping(name: str, value: Any) -> pb.EarlyStopping:
    known: dict[Any, pb.EarlyStopping] = {
        True: pb.EARLY_STOPPING_AT_ONCE,
        False: pb.EARLY_STOPPING_UNSPECIFIED,
        "never": pb.EARLY_STOPPING_NEVER,
    }
    if not isinstance(value, bool | str) or value not in known:
        raise refuse(name, value, 'true, false or "never"')
    return known[value]


_BIAS = Kind({"type": "object", "additionalProperties": {"type": "number"}}, _bias)
_EARLY = Kind(
    {"anyOf": [{"type": "boolean"}, {"type": "string", "enum": ["never"]}]}, _early_stopping
)


def _changed(kind: Kind, change: Callable[[Any], Any]) -> Kind:
    return Kind(kind.schema, lambda name, value: change(kind.read(name, value)), kind.from_text)


OPTIONS = (
    Field("max_tokens", INTEGER, "how many tokens to make at most", "max_new_tokens"),
    Field("temperature", NUMBER, "0 is greedy", "temperature"),
    Field("top_p", NUMBER, "the likeliest tokens that reach this together; 1 is off", "top_p"),
    Field(
        "top_k",
        _changed(INTEGER, lambda k: 0 if k == -1 else k),  # vLLM's way to say off
        "the k likeliest tokens; 0 and -1 are off",
        "top_k",
    ),
    Field("min_p", NUMBER, "tokens at least this share as likely as the likeliest", "min_p"),
    Field("repetition_penalty", NUMBER, "above 1 repeats less; 1 is off", "repetition_penalty"),
    Field("frequency_penalty", NUMBER, "from -2 to 2", "frequency_penalty"),
    Field("presence_penalty", NUMBER, "from -2 to 2", "presence_penalty"),
    Field("logit_bias", _BIAS, "from -100 to 100 by token id", "logit_bias"),
    Field(
        "seed",
        _changed(INTEGER, lambda seed: seed % 2**64),  # negative ones are legal
        "the same seed, request and model give the same tokens",
        "seed",
    ),
    Field("stop", STRINGS, "strings that end an answer; they aren't part of it", "stop"),
    Field("stop_token_ids", INTEGERS, "tokens that end an answer", "stop_token_ids"),
    Field("ignore_eos", BOOLEAN, "go on after the model's own end", "ignore_eos"),
    Field("min_tokens", INTEGER, "no end of the model's before so many", "min_new_tokens"),
    Field("n", INTEGER, "how many answers", "num_sequences"),
    Field("prompt_logprobs", INTEGER, "log-probabilities of the prompt", "prompt_logprobs"),
    Field(
        "priority",
        _changed(INTEGER, lambda priority: -priority),
        "lower goes first, as in vLLM: the opposite of gRPC's. From -10 to 10",
        "priority",
    ),
    Field("num_beams", INTEGER, "beam search: nothing is drawn, the best are found", "num_beams"),
    Field("length_penalty", NUMBER, "of beams: above 0 favours long answers", "length_penalty"),
    Field("early_stopping", _EARLY, "of beams: when to be content", "early_stopping"),
    *CONSTRAINTS,
)

_LATER = "Leave it out"
REFUSED = (
    Refused("use_beam_search", (False,), "Give num_beams instead"),
    Refused("logits_processors", ([],), _LATER),
    Refused("bad_words", ([],), "Give logit_bias of -100 instead"),
    Refused("allowed_token_ids", ([],), "Give logit_bias instead"),
    Refused("truncate_prompt_tokens", (), "Cut the prompt yourself"),
)


def fill(message: Message, values: Mapping[str, Any], fields: Sequence[Field] = OPTIONS) -> None:
    """Puts what was read into a message of generation.proto. Its rules are checked later."""
    for field in fields:
        if not field.into or values.get(field.name) is None:
            continue
        value = values[field.name]
        if isinstance(value, Message):
            if message.HasField(field.into):
                raise InvalidFieldError(field.name, "is set, and so is another form. Give one")
            getattr(message, field.into).CopyFrom(value)
            continue
        try:
            if isinstance(value, dict):
                getattr(message, field.into).update(value)
            elif isinstance(value, list):
                getattr(message, field.into).extend(value)
            else:
                setattr(message, field.into, value)
        except ValueError:  # more bits than the field has
            raise InvalidFieldError(field.name, "is a number that is too large") from None


def as_written(
    error: InvalidFieldError, values: Json, fields: Sequence[Field]
) -> InvalidFieldError:
    """The same error with the name that the client knows the field by."""
    names = [field.name for field in fields if field.into == error.field.partition(".")[0]]
    given = [name for name in names if name in values]
    if not names:
        return as_nested(error)
    return InvalidFieldError(given[-1] if given else names[0], error.reason)
