"""Turns what came over the wire into a Request, or says which field is wrong and why.

Knows: protobuf, every limit of generation.proto. Does not know: gRPC, the engine.
Protobuf objects stop here. Ranges of single numbers are checked by server/request.py.
"""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from quill.protos import generation_pb2 as pb
from quill.server.errors import InvalidFieldError, UnimplementedError
from quill.server.fields import MAX_SEED
from quill.server.grammar.constraint_source import Constraint
from quill.server.protocol.constraint_fields import read_constraint
from quill.server.protocol.prompt_fields import PromptReader, check_allowed
from quill.server.protocol.sampling_fields import SamplingReader
from quill.server.protocol.served_model import ServedModel
from quill.server.protocol.tool_fields import ToolUse, read_tools
from quill.server.request import Request

MAX_STOPS = 16
MAX_STOP_BYTES = 256
MAX_STOP_IDS = 64
WRITES_NOTHING = "this model is an encoder, which writes nothing. It has Embed and FillMask"


@dataclass(frozen=True, kw_only=True)
class Arrival:
    """What is known of a call beside its message."""

    request_id: str
    deadline_s: float | None  # on the engine's clock
    owner: str = ""
    cache_scope: str = ""
    max_prompt_tokens: int | None = None  # the caller's own limit


@dataclass(frozen=True, kw_only=True)
class ParsedRequest:
    """A request, and what is done with its answer on the way to the client."""

    request: Request
    stop: tuple[str, ...] = ()
    echo: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None  # of masks, too
    normalize: bool = False  # vectors
    dimensions: int | None = None  # of vectors; None: all
    constraint: Constraint | None = None  # whose grammar the request gets
    tools: ToolUse | None = None  # that they may call

    @property
    def given_ids(self) -> tuple[int, ...]:
        """What is continued, or translated."""
        return self.request.source_ids or self.request.prompt_ids


class RequestReader:
    """Reads requests for one model. May take long for long texts: not for the event loop."""

    def __init__(self, served: ServedModel) -> None:
        self._served = served
        self._prompts = PromptReader(served)
        self._sampling = SamplingReader(served)

    def read_generate(self, message: pb.GenerateRequest, arrival: Arrival) -> ParsedRequest:
        if self._served.is_encoder:
            raise UnimplementedError(WRITES_NOTHING)
        self._check_lists(message)
        has = message.HasField
        logprobs = message.logprobs if has("logprobs") else None
        prompt_logprobs = message.prompt_logprobs if has("prompt_logprobs") else None
        # An echoed prompt's tokens have their logprobs too.
        wanted = [prompt_logprobs, logprobs if message.echo else None]
        eos_ids = () if message.ignore_eos else self._served.manifest.stop_ids
        # From the quickest check to the longest: the prompt is read last.
        seed = message.seed if has("seed") else secrets.randbelow(MAX_SEED + 1)
        max_new_tokens = self._max_new_tokens(message)
        num_sequences = self._num_sequences(message)
        sampling = self._sampling.read_sampling(message)
        beams = self._sampling.read_beams(message)
        constraint = read_constraint(message, self._served)
        tools = read_tools(message, self._served)
        most = arrival.max_prompt_tokens
        prompt_ids, source_ids = self._prompts.read(message, most, tools)
        request = Request(
            request_id=arrival.request_id,
            prompt_ids=prompt_ids,
            source_ids=source_ids,
            sampling=sampling,
            beams=beams,
            seed=seed,
            max_new_tokens=max_new_tokens,
            min_new_tokens=message.min_new_tokens,
            eos_ids=frozenset(eos_ids),
            stop_ids=frozenset(message.stop_token_ids),
            num_sequences=num_sequences,
            logprobs=logprobs,
            prompt_logprobs=max((each for each in wanted if each is not None), default=None),
            priority=message.priority,
            deadline_s=arrival.deadline_s,
            owner=arrival.owner,
            cache_scope=arrival.cache_scope,
        )
        if request.min_new_tokens and len(request.ends) == self._served.vocab_size:
            rule = "every token would end the answer, so none could be chosen before"
            raise InvalidFieldError("min_new_tokens", f"is {request.min_new_tokens}; {rule}")
        if not self._served.limits.fits(request):
            needed = f"{request.num_rows} answers or beams of so many tokens"
            rule = f"{needed} are more than this server has memory for. Ask for fewer of either"
            raise InvalidFieldError("max_new_tokens", f"is {max_new_tokens}; {rule}")
        return ParsedRequest(
            request=request,
            stop=tuple(message.stop),
            echo=message.echo,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            constraint=constraint
            if tools is None or tools.constraint is None
            else tools.constraint,
            tools=tools,
        )

    def read_score(self, message: pb.ScoreRequest, arrival: Arrival) -> ParsedRequest:
        if self._served.is_encoder:
            raise UnimplementedError(WRITES_NOTHING)
        if self._served.is_translator:
            raise UnimplementedError("a translation model can't score a text by itself")
        kind = message.WhichOneof("input")
        if kind is None:
            raise InvalidFieldError("input", "is missing: give text or token_ids")
        if kind == "text":
            ids = self._prompts.encode(message.text, "text")
        else:
            ids = list(message.token_ids.ids)
            self._prompts.check_ids("token_ids", ids)
        most = self._served.context
        if not 2 <= len(ids) <= most:
            raise InvalidFieldError(kind, f"has {len(ids)} tokens; it must have from 2 to {most}")
        check_allowed(kind, len(ids), arrival.max_prompt_tokens)
        request = Request(
            request_id=arrival.request_id,
            prompt_ids=tuple(ids),
            max_new_tokens=0,
            prompt_logprobs=0,
            priority=message.priority,
            deadline_s=arrival.deadline_s,
            owner=arrival.owner,
            cache_scope=arrival.cache_scope,
        )
        return ParsedRequest(request=request, prompt_logprobs=0)

    def _check_lists(self, message: pb.GenerateRequest) -> None:
        _check_stops(message.stop)
        if len(message.stop_token_ids) > MAX_STOP_IDS:
            given = f"has {len(message.stop_token_ids)} entries"
            rule = f"at most {MAX_STOP_IDS} are allowed"
            raise InvalidFieldError("stop_token_ids", f"{given}; {rule}")
        if self._served.is_translator:
            _check_translation(message)
        self._prompts.check_ids("stop_token_ids", message.stop_token_ids)
        self._prompts.check_ids("logit_bias", message.logit_bias)

    def _max_new_tokens(self, message: pb.GenerateRequest) -> int:
        served, is_given = self._served, message.HasField("max_new_tokens")
        wanted = message.max_new_tokens if is_given else served.default_max_new_tokens
        if not 1 <= wanted <= served.context:
            rule = f"it must be from 1 to {served.context}, the context"
            raise InvalidFieldError("max_new_tokens", f"is {wanted}; {rule}")
        return wanted

    def _num_sequences(self, message: pb.GenerateRequest) -> int:
        most = self._served.max_num_sequences
        wanted = message.num_sequences if message.HasField("num_sequences") else 1
        if not 1 <= wanted <= most:
            raise InvalidFieldError("num_sequences", f"is {wanted}; it must be from 1 to {most}")
        return wanted


def _check_translation(message: pb.GenerateRequest) -> None:
    if message.HasField("prompt_logprobs"):
        raise InvalidFieldError("prompt_logprobs", "is set; a translation model doesn't rate those")
    if message.echo:
        raise InvalidFieldError("echo", "is set; a translation doesn't continue its prompt")


def _check_stops(stops: Sequence[str]) -> None:
    if len(stops) > MAX_STOPS:
        raise InvalidFieldError(
            "stop", f"has {len(stops)} entries; at most {MAX_STOPS} are allowed"
        )
    for stop in stops:
        if not 1 <= len(stop.encode()) <= MAX_STOP_BYTES:
            given = f"has an entry of {len(stop.encode())} bytes"
            raise InvalidFieldError("stop", f"{given}; each must have from 1 to {MAX_STOP_BYTES}")
