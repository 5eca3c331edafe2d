"""How answers are found, read from a message: drawn token by token, or searched with beams.

Knows: protobuf, the model's defaults, which fields go together. Does not know: what is answered.
"""

from quill.protos import generation_pb2 as pb
from quill.server.errors import InvalidFieldError
from quill.server.fields import SAMPLING
from quill.server.protocol.served_model import ServedModel
from quill.server.request import BeamParams, EarlyStopping, SamplingParams

_EARLY_STOPPING: dict[int, EarlyStopping] = {
    pb.EARLY_STOPPING_UNSPECIFIED: "heuristic",
    pb.EARLY_STOPPING_AT_ONCE: "at_once",
    pb.EARLY_STOPPING_NEVER: "never",
}


class SamplingReader:
    """Reads how clients want one model's answers."""

    def __init__(self, served: ServedModel) -> None:
        self._served = served

    def read_sampling(self, message: pb.GenerateRequest) -> SamplingParams:
        if _searches(message):
            return SamplingParams()  # a search looks at the model's own distribution
        given, default = message, self._served.default_sampling
        has = message.HasField
        top_k = given.top_k if has("top_k") else default.top_k
        penalty = default.repetition_penalty
        return SamplingParams(
            temperature=given.temperature if has("temperature") else default.temperature,
            # More than the vocabulary is the same as off.
            top_k=0 if top_k >= self._served.vocab_size else top_k,
            top_p=given.top_p if has("top_p") else default.top_p,
            min_p=given.min_p if has("min_p") else default.min_p,
            repetition_penalty=given.repetition_penalty if has("repetition_penalty") else penalty,
            frequency_penalty=given.frequency_penalty,
            presence_penalty=given.presence_penalty,
            logit_bias=dict(given.logit_bias),
        )

    def read_beams(self, message: pb.GenerateRequest) -> BeamParams | None:
        if not _searches(message):
            _refuse_without_beams(message)
            return None
        most = self._served.max_num_beams
        if not 1 <= message.num_beams <= most:
            some = f"it must be from 1, which is off, to {most}"
            rule = some if most > 1 else "there is one slot"
            raise InvalidFieldError("num_beams", f"is {message.num_beams}; {rule}")
        _refuse_with_beams(message)
        self._check_vocabulary(message)
        if message.early_stopping not in _EARLY_STOPPING:
            given = f"is {message.early_stopping}"
            raise InvalidFieldError("early_stopping", f"{given}; there is no such")
        return BeamParams(
            num_beams=message.num_beams,
            length_penalty=message.length_penalty if message.HasField("length_penalty") else 1.0,
            early_stopping=_EARLY_STOPPING[message.early_stopping],
        )

    def _check_vocabulary(self, message: pb.GenerateRequest) -> None:
        """The first step must find as many beams as are asked for."""
        eos_ids = () if message.ignore_eos else self._served.manifest.stop_ids
        ends = {*message.stop_token_ids, *eos_ids}
        most = self._served.vocab_size // max(2, 1 + len(ends))
        if message.num_beams > most:
            rule = f"with {len(ends)} tokens that end an answer, this vocabulary allows {most}"
            raise InvalidFieldError("num_beams", f"is {message.num_beams}; {rule}")


def _searches(message: pb.GenerateRequest) -> bool:
    return message.HasField("num_beams") and message.num_beams != 1


def _refuse_without_beams(message: pb.GenerateRequest) -> None:
    for name in ("length_penalty", "early_stopping"):
        is_set = message.HasField(name) if name == "length_penalty" else getattr(message, name)
        if is_set:
            raise InvalidFieldError(name, "is set, and num_beams isn't above 1. Set it, too")


def _refuse_with_beams(message: pb.GenerateRequest) -> None:
    """A search draws nothing and changes no logits, and can't know where a string will appear."""
    for field, value in message.ListFields():
        if field.name in SAMPLING and value != _OFF.get(field.name):
            reason = "is set, and a search with beams looks at the model's own distribution"
            raise InvalidFieldError(field.name, f"{reason}. Leave out one of it and num_beams")
    if message.stop:
        raise InvalidFieldError("stop", "is set, and beams only stop at tokens: use stop_token_ids")


# What clients send that always send everything.
_OFF = {"temperature": 0, "top_k": 0, "top_p": 1, "min_p": 0, "repetition_penalty": 1}
