"""What both clients share: making requests, reading errors, deciding when to try again.

Knows: generation.proto, gRPC's errors and their rich details. Does not know: channels, waiting.
"""

import logging
import random
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

import grpc
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from quill.protos import generation_pb2 as pb
from quill.server.access import Access
from quill.server.errors import ServerError
from quill.server.unreachable import diagnose

logger = logging.getLogger(__name__)

_OVERLOADED = grpc.StatusCode.RESOURCE_EXHAUSTED
# What gRPC says for a server with too many calls that it hasn't looked at, or one that stops. Who
# cancels a call itself hears other words.
_DROPPED = (grpc.StatusCode.CANCELLED, "CANCELLED")
# Answers with many logprobs are larger than gRPC's default limit of 4 MB.
CHANNEL_OPTIONS = (("grpc.max_receive_message_length", -1),)

# A text, token ids, or a conversation of {"role": …, "content": …}.
Prompt = str | Sequence[int] | Sequence[Mapping[str, str]]


class Options(TypedDict, total=False):
    """As in GenerateRequest, which says what each means and what it is when it isn't given."""

    max_new_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    frequency_penalty: float
    presence_penalty: float
    logit_bias: Mapping[int, float]
    seed: int
    stop: Sequence[str]
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    num_sequences: int
    logprobs: int
    prompt_logprobs: int
    echo: bool
    priority: int
    num_beams: int
    length_penalty: float
    early_stopping: pb.EarlyStopping


class CallError(ServerError):
    """A call that failed. `code` names a gRPC status; `field` is set if the request is wrong.

    `is_lasting`: asked again as it is, it would fail again.
    """

    def __init__(
        self,
        code: grpc.StatusCode,
        message: str,
        field: str | None = None,
        retry_after_s: float | None = None,
        is_lasting: bool = False,
    ) -> None:
        super().__init__(f"{message} ({code.name})")
        self.code = code
        self.reason = message
        self.is_lasting = is_lasting
        self.field = field
        self.retry_after_s = retry_after_s


def make_request(prompt: Prompt, options: Options) -> pb.GenerateRequest:
    try:
        return pb.GenerateRequest(**_input(prompt), **options)
    except (ValueError, TypeError, OverflowError) as error:
        reason = f"the request can't be written: {error}"
        raise CallError(grpc.StatusCode.INVALID_ARGUMENT, reason) from error


def score_request(text: str | Sequence[int]) -> pb.ScoreRequest:
    if isinstance(text, str):
        return pb.ScoreRequest(text=text)
    return pb.ScoreRequest(token_ids=pb.TokenIds(ids=text))


def seeded(request: pb.GenerateRequest) -> pb.GenerateRequest:
    """With a seed of its own, if it has none: so that it can be asked again."""
    if not request.HasField("seed"):
        request.seed = secrets.randbits(63)
    return request


def _input(prompt: Prompt) -> dict[str, Any]:
    if isinstance(prompt, str):
        return {"prompt": prompt}
    ids = [each for each in prompt if isinstance(each, int)]
    if len(ids) == len(prompt):
        return {"prompt_ids": pb.TokenIds(ids=ids)}
    messages = [pb.Message(**each) for each in prompt if isinstance(each, Mapping)]
    return {"messages": pb.Conversation(messages=messages)}


def read_error(error: grpc.RpcError, access: Access) -> CallError:
    """What the server said, with the details that it gave; or why there is none."""
    call: Any = error  # every RpcError that a call raises is a Call too, which no type says
    field, retry_after_s = None, None
    status = rpc_status.from_call(_Ended(call.code(), call.details(), call.trailing_metadata()))
    for detail in status.details if status is not None else ():
        bad_request, retry = error_details_pb2.BadRequest(), error_details_pb2.RetryInfo()
        if detail.Unpack(bad_request) and bad_request.field_violations:
            field = bad_request.field_violations[0].field
        elif detail.Unpack(retry):
            retry_after_s = retry.retry_delay.ToNanoseconds() / 1e9
    reason = call.details() or "no reason was given"
    if (call.code(), reason) == _DROPPED:
        return CallError(grpc.StatusCode.UNAVAILABLE, "the server dropped the call before it began")
    if call.code() is grpc.StatusCode.UNAVAILABLE and (found := diagnose(reason, access)):
        return CallError(call.code(), found.reason, is_lasting=found.is_lasting)
    return CallError(call.code(), reason, field, retry_after_s)


@dataclass(frozen=True)
class _Ended:
    """The part of a call that rpc_status reads; AioRpcError isn't a Call."""

    _code: grpc.StatusCode
    _details: str
    _metadata: Any

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str:
        return self._details

    def trailing_metadata(self) -> Any:
        return self._metadata


@dataclass(frozen=True, kw_only=True)
class Retries:
    """When to try again, and after how long. Only calls that have no answer yet are repeated."""

    max_retries: int = 5
    first_s: float = 0.2
    max_s: float = 30.0

    def delay_s(self, error: CallError, num_tried: int, left_s: float | None) -> float | None:
        """None: give up. The server's own wish goes first; the deadline is never overrun."""
        if num_tried >= self.max_retries or not _is_passing(error):
            return None
        delay_s = error.retry_after_s
        if delay_s is None:
            # Spread out, so that clients that failed together don't come back together.
            delay_s = min(self.first_s * 2**num_tried, self.max_s) * random.uniform(0.5, 1)
        return None if left_s is not None and delay_s >= left_s else delay_s

    def warn(self, error: CallError, delay_s: float) -> None:
        """Lest somebody wait and not know what for. Where logging isn't set up, on stderr."""
        busy = "the server is busy: " if error.code is _OVERLOADED else ""
        logger.warning(
            "%s%s (trying again in %.1f s, %d times at most)",
            *(busy, error.reason, delay_s, self.max_retries),
        )


class Attempts:
    """The attempts at one call, until it succeeds or its time is up."""

    def __init__(self, retries: Retries, timeout_s: float | None) -> None:
        self._retries = retries
        self._end_s = None if timeout_s is None else time.monotonic() + timeout_s
        self._num_failed = 0

    @property
    def left_s(self) -> float | None:
        return None if self._end_s is None else max(0.0, self._end_s - time.monotonic())

    def delay_s(self, error: CallError, *, warn: bool = True) -> float | None:
        """After one has failed: how long to wait before the next. None: give up."""
        delay_s = self._retries.delay_s(error, self._num_failed, self.left_s)
        if warn and delay_s is not None and not self._num_failed:
            self._retries.warn(error, delay_s)
        self._num_failed += 1
        return delay_s


def _is_passing(error: CallError) -> bool:
    # Without a delay it isn't overload, but a message that is too large.
    if error.code is _OVERLOADED and error.retry_after_s is not None:
        return True
    return error.code is grpc.StatusCode.UNAVAILABLE and not error.is_lasting
