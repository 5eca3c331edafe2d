"""Sends one request and measures what comes back.

Knows: the clock. Does not know: wires; Locust, gevent: under them its waits let others run.
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

from quill.loadtest.protocols.door import CallError, Door
from quill.loadtest.workload.ask import Ask
from quill.loadtest.workload.records import RequestRecord
from quill.protos import generation_pb2 as pb

Clock = Callable[[], float]
_PREFIX = "FINISH_REASON_"


@dataclass
class StreamResult:
    """What was received until now. Times are of the clock.

    Of several sequences the tokens are in the sequences' order, in whichever they came; and what
    is known at the end is what sequence 0 ended with.
    """

    token_ids: list[int] = field(default_factory=list)
    vectors: list[bytes] = field(default_factory=list)  # float32
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

    def take_vectors(self, response: pb.EmbedResponse) -> None:
        """Its end is told as a stream's would be."""
        self.vectors = [array("f", each.values).tobytes() for each in response.embeddings]
        self.num_bytes = response.ByteSize()
        finish = pb.FINISH_REASON_LENGTH
        self.last = pb.GenerateChunk(
            finish_reason=finish, usage=response.usage, timings=response.timings
        )


def call(
    door: Door,
    ask: Ask,
    intended_s: float,
    clock: Clock = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> "TimedCall":
    """One request from its start to its end, however it ends. `intended_s`: of the clock."""
    sent_s = clock()
    heard = StreamResult()
    try:
        if ask.embed is not None:
            _embed(door, ask, ask.embed, heard)
        else:
            # If we are stopped in the middle, the server needn't go on.
            with closing(door.stream(ask.request, ask.timeout_s)) as stream:
                _listen(stream, ask, heard, clock, sleep)
    except CallError as error:
        heard.status, heard.message = error.status, error.message
    return TimedCall(heard, intended_s, sent_s, clock())


def _embed(door: Door, ask: Ask, request: pb.EmbedRequest, heard: StreamResult) -> None:
    heard.take_vectors(door.embed(request, ask.timeout_s))
    if len(heard.vectors) != len(request.inputs) or not all(heard.vectors):
        heard.status, heard.message = "EMPTY", "OK, and there isn't a vector for each text"


def _listen(
    stream: Iterable[pb.GenerateChunk],
    ask: Ask,
    heard: StreamResult,
    clock: Clock,
    sleep: Callable[[float], None],
) -> None:
    for chunk in stream:
        heard.take(chunk, clock())
        if ask.cancel_after is not None and len(heard.token_ids) >= ask.cancel_after:
            heard.status = "CANCELLED"
            return
        if ask.pause_s:
            sleep(ask.pause_s)
    if heard.last is None or not heard.token_ids:
        heard.status, heard.message = "EMPTY", "the stream ended with OK and without an answer"


@dataclass(frozen=True)
class TimedCall:
    """A call that has ended, with its times."""

    heard: StreamResult
    intended_s: float
    sent_s: float
    ended_s: float

    def record(
        self, ask: Ask, index: int, scenario: str, intended_at_s: float, offered_rate: float = 0.0
    ) -> RequestRecord:
        """`intended_at_s`: the intended start since 1970."""
        heard, last = self.heard, self.heard.last
        arrivals_ms = tuple(self._ms(time_s) for time_s in heard.arrivals_s)
        seed = ask.request.seed if ask.request.HasField("seed") else None
        return RequestRecord(
            index=index,
            scenario=scenario,
            intended_at_s=intended_at_s,
            status=heard.status,
            ok=heard.status in ask.expected,
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
            message=heard.message,
            token_ids=tuple(heard.token_ids),
            arrivals_ms=arrivals_ms,
            request=to_json(ask.embed or ask.request),
            vectors=digest(heard.vectors),
        )

    def _ms(self, time_s: float) -> float:
        return round(1000 * (time_s - self.intended_s), 3)


def finish_name(chunk: pb.GenerateChunk) -> str:
    return pb.FinishReason.Name(chunk.finish_reason).removeprefix(_PREFIX)


def digest(vectors: Sequence[bytes]) -> str:
    return hashlib.sha256(b"".join(vectors)).hexdigest() if vectors else ""


def to_json(request: pb.GenerateRequest | pb.EmbedRequest) -> str:
    """One line, and exact: what is read back is the same request."""
    return json_format.MessageToJson(request, indent=None, ensure_ascii=False)


def from_json(text: str) -> pb.GenerateRequest:
    return json_format.Parse(text, pb.GenerateRequest())


def embed_from_json(text: str) -> pb.EmbedRequest | None:
    """None: it asked for something else."""
    return json_format.Parse(text, pb.EmbedRequest()) if "inputs" in json.loads(text) else None
