"""How answers are found, read from a message: drawn token by token, or searched with beams.

Knows: protobuf, the model's defaults, which fields go together. Does not know: what is answered.
"""

from typing import Any

from protos import generation_pb2 as pb
from server.errors import InvalidFieldError
from server.request import Beams, EarlyStopping, Sampling
from server.served import SAMPLING_DEFAULTS, Served

_EARLY_STOPPING: dict[int, EarlyStopping] = {
    pb.EARLY_STOPPING_UNSPECIFIED: "guess",
    pb.EARLY_STOPPING_AT_ONCE: "at_once",
    pb.EARLY_STOPPING_NEVER: "never",
}


def read_sampling(message: pb.GenerateRequest, served: Served) -> Sampling:
    if searches(message):
        return Sampling()  # a search looks at the model's own distribution
    defaults = served.sampling_defaults
    settings: dict[str, Any] = {
        name: getattr(message, name) if message.HasField(name) else defaults[name]
        for name in SAMPLING_DEFAULTS
        if message.HasField(name) or name in defaults
    }
    # More than the vocabulary is the same as off.
    if settings.get("top_k", 0) >= served.vocab_size:
        settings["top_k"] = 0
    return Sampling(
        frequency_penalty=message.frequency_penalty,
        presence_penalty=message.presence_penalty,
        logit_bias=dict(message.logit_bias),
        **settings,
    )


def searches(message: pb.GenerateRequest) -> bool:
    return message.HasField("num_beams") and message.num_beams != 1


def read_beams(message: pb.GenerateRequest, served: Served) -> Beams | None:
    if not searches(message):
        _refuse_without_beams(message)
        return None
    if not 1 <= message.num_beams <= served.max_num_beams:
        most = served.max_num_beams
        rule = f"it must be from 1, which is off, to {most}" if most > 1 else "there is one slot"
        raise InvalidFieldError("num_beams", f"is {message.num_beams}; {rule}")
    _refuse_with_beams(message)
    _check_vocabulary(message, served)
    if message.early_stopping not in _EARLY_STOPPING:
        raise InvalidFieldError("early_stopping", f"is {message.early_stopping}; there is no such")
    return Beams(
        num_beams=message.num_beams,
        length_penalty=message.length_penalty if message.HasField("length_penalty") else 1.0,
        early_stopping=_EARLY_STOPPING[message.early_stopping],
    )


def _refuse_without_beams(message: pb.GenerateRequest) -> None:
    for name in ("length_penalty", "early_stopping"):
        is_set = message.HasField(name) if name == "length_penalty" else getattr(message, name)
        if is_set:
            raise InvalidFieldError(name, "is set, and num_beams isn't above 1. Set it, too")


def _refuse_with_beams(message: pb.GenerateRequest) -> None:
    """A search draws nothing and changes no logits, and can't know where a string will appear."""
    for field, value in message.ListFields():
        if field.name in _DRAWING and value != _OFF.get(field.name):
            reason = "is set, and a search with beams looks at the model's own distribution"
            raise InvalidFieldError(field.name, f"{reason}. Leave out one of it and num_beams")
    if message.stop:
        raise InvalidFieldError("stop", "is set, and beams only stop at tokens: use stop_token_ids")


# What clients send that always send everything.
_OFF = {"temperature": 0, "top_k": 0, "top_p": 1, "min_p": 0, "repetition_penalty": 1}
_DRAWING = frozenset({*SAMPLING_DEFAULTS, "frequency_penalty", "presence_penalty", "logit_bias"})


def _check_vocabulary(message: pb.GenerateRequest, served: Served) -> None:
    """The first step must find as many beams as are asked for."""
    ends = {*message.stop_token_ids, *(() if message.ignore_eos else served.manifest.stop_ids)}
    most = served.vocab_size // max(2, 1 + len(ends))
    if message.num_beams > most:
        rule = f"with {len(ends)} tokens that end an answer, this vocabulary allows {most}"
        raise InvalidFieldError("num_beams", f"is {message.num_beams}; {rule}")
