"""Sends one request and measures what comes back.

Knows: the clock. Does not know: protocols; Locust, gevent: under them its waits let others run.
"""

import hashlib
import json
import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass, field

from google.protobuf import json_format

from quill.loadtest.protocols.grpc import CallError, ProtocolClient
from quill.loadtest.workload.records import RequestRecord
from quill.loadtest.workload.request import LoadRequest
from quill.protos import generation_pb2 as pb

Clock = Callable[[], float]
_PREFIX = "FINISH_REASON_"


@dataclass
class StreamResult:
    """What was received until now. Times are the clock's.

    The tokens of several sequences are in the sequences' order, not in the order of arrival.
    `last` is the last chunk of sequence 0.
    """

    token_ids: list[int] = field(default_factory=list)
    embeddings: list[bytes] = field(default_factory=list)  # float32
    arrivals_s: list[float] = field(default_factory=list)
    num_bytes: int = 0  # of all messages
    last: pb.GenerateChunk | None = None
    status: str = "OK"
    message: str = ""
    _lengths: Counter[int] = field(default_factory=Counter)

    def take(self, chunk: pb.GenerateChunk, now_s: float) -> None:
        end = sum(n for sequence, n in self._lengths.items() if sequence <= chunk.sequence)
        self.token_ids[end:end] = chunk.token_ids
        self._lengths[chunk.sequence] += len(chunk.token_ids)
        self.arrivals_s += [now_s] * len(chunk.token_ids)
        self.num_bytes += chunk.ByteSize()
        if chunk.finish_reason and chunk.sequence == 0:
            self.last = chunk

    def take_embeddings(self, response: pb.EmbedResponse) -> None:
        """Makes a last chunk, as a stream has."""
        self.embeddings = [array("f", each.values).tobytes() for each in response.embeddings]
        self.num_bytes = response.ByteSize()
        finish = pb.FINISH_REASON_LENGTH
        self.last = pb.GenerateChunk(
            finish_reason=finish, usage=response.usage, timings=response.timings
        )


def call(
    client: ProtocolClient,
    load: LoadRequest,
    intended_s: float,
    clock: Clock = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> "TimedCall":
    """One request from its start to its end. `intended_s`: its planned start on the clock."""
    sent_s = clock()
    result = StreamResult()
    try:
        if load.embed is not None:
            _embed(client, load, load.embed, result)
        else:
            # A user that is stopped in the middle cancels its request.
            with closing(client.stream(load.request, load.timeout_s)) as stream:
                _receive(stream, load, result, clock, sleep)
    except CallError as error:
        result.status, result.message = error.status, error.message
        # At the deadline the server resets the stream; that may come before the client's own timer.
        if error.status == "CANCELLED" and clock() - sent_s >= load.timeout_s:
            result.status = "DEADLINE_EXCEEDED"
    return TimedCall(result, intended_s, sent_s, clock())


def _embed(
    client: ProtocolClient, load: LoadRequest, request: pb.EmbedRequest, result: StreamResult
) -> None:
    result.take_embeddings(client.embed(request, load.timeout_s))
    if len(result.embeddings) != len(request.inputs) or not all(result.embeddings):
        result.status, result.message = "EMPTY", "OK without an embedding for each text"


def _receive(
    stream: Iterable[pb.GenerateChunk],
    load: LoadRequest,
    result: StreamResult,
    clock: Clock,
    sleep: Callable[[float], None],
) -> None:
    for chunk in stream:
        result.take(chunk, clock())
        if load.cancel_after is not None and len(result.token_ids) >= load.cancel_after:
            result.status = "CANCELLED"
            return
        if load.pause_s:
            sleep(load.pause_s)
    if result.last is None or not result.token_ids:
        result.status, result.message = "EMPTY", "the stream ended with OK and without an answer"


@dataclass(frozen=True)
class TimedCall:
    """A call that has ended, with its times."""

    result: StreamResult
    intended_s: float
    sent_s: float
    ended_s: float

    def record(
        self,
        load: LoadRequest,
        index: int,
        scenario: str,
        intended_at_s: float,
        offered_rate: float = 0.0,
    ) -> RequestRecord:
        """`intended_at_s`: the intended start since 1970."""
        result, last = self.result, self.result.last
        arrivals_ms = tuple(self._ms(time_s) for time_s in result.arrivals_s)
        seed = load.request.seed if load.request.HasField("seed") else None
        return RequestRecord(
            index=index,
            scenario=scenario,
            intended_at_s=intended_at_s,
            status=result.status,
            ok=result.status in load.expected,
            offered_rate=offered_rate,
            late_ms=self._ms(self.sent_s),
            first_token_ms=arrivals_ms[0] if arrivals_ms else None,
            total_ms=self._ms(self.ended_s),
            server_first_token_ms=(last.timings.first_token_ms or None) if last else None,
            server_queue_ms=last.timings.queue_ms if last else None,
            finish_reason=finish_name(last) if last else "",
            prompt_tokens=last.usage.prompt_tokens if last else 0,
            cached_tokens=last.usage.cached_tokens if last else 0,
            seed=last.seed if last else seed,
            message=result.message,
            token_ids=tuple(result.token_ids),
            arrivals_ms=arrivals_ms,
            request=to_json(load.embed or load.request),
            embeddings=digest(result.embeddings),
        )

    def _ms(self, time_s: float) -> float:
        return round(1000 * (time_s - self.intended_s), 3)


def finish_name(chunk: pb.GenerateChunk) -> str:
    return pb.FinishReason.Name(chunk.finish_reason).removeprefix(_PREFIX)


def digest(embeddings: Sequence[bytes]) -> str:
    return hashlib.sha256(b"".join(embeddings)).hexdigest() if embeddings else ""


def to_json(request: pb.GenerateRequest | pb.EmbedRequest) -> str:
    """One line, and exact: what is read back is the same request."""
    return json_format.MessageToJson(request, indent=None, ensure_ascii=False)


def from_json(text: str) -> pb.GenerateRequest:
    return json_format.Parse(text, pb.GenerateRequest())


def embed_from_json(text: str) -> pb.EmbedRequest | None:
    """None: not an embedding request."""
    return json_format.Parse(text, pb.EmbedRequest()) if "inputs" in json.loads(text) else None
