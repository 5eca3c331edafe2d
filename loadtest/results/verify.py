"""Asks every request of a run again, alone, and compares the answers.

Knows: records, how to ask. Does not know: how the load was made.
The same seed must give the same tokens in any company. Whoever left early or was cut off must have
got the beginning of what it gets alone; whoever was refused for breaking a rule is refused again.
Vectors must be the same bits. Through whichever door the load went, it is asked again over gRPC.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field

from quill.loadtest.errors import DifferentAnswerError
from quill.loadtest.protocols.grpc_door import GrpcDoor
from quill.loadtest.workload.ask import Ask
from quill.loadtest.workload.call import (
    StreamResult,
    call,
    digest,
    embed_from_json,
    finish_name,
    from_json,
)
from quill.loadtest.workload.records import RequestRecord
from quill.protos import generation_pb2 as pb
from quill.server.client.access import Access

WHOLE = ("EOS", "LENGTH", "STOP")
REFUSED = ("INVALID_ARGUMENT", "FAILED_PRECONDITION")
_SHOWN = 5

Replay = Callable[[Ask], StreamResult]


@dataclass
class Verdict:
    num_equal: int = 0
    differences: list[str] = field(default_factory=list)
    not_compared: Counter[str] = field(default_factory=Counter)

    @property
    def num_compared(self) -> int:
        return self.num_equal + len(self.differences)

    def __str__(self) -> str:
        text = f"verified: {self.num_equal:,} of {self.num_compared:,} answers are equal alone"
        for reason, number in sorted(self.not_compared.items()):
            text += f"; {number:,} not compared: {reason}"
        return text

    def check(self) -> None:
        if not self.num_compared:
            raise DifferentAnswerError(f"nothing could be compared ({self})")
        if self.differences:
            shown = "; ".join(self.differences[:_SHOWN])
            raise DifferentAnswerError(
                f"{len(self.differences):,} of {self.num_compared:,} answers differ: {shown}"
            )


def verify(
    address: str,
    records: Sequence[RequestRecord],
    show: Callable[[int, Verdict], None],
    access: Access | None = None,
) -> Verdict:
    """One after the other. `show` is told after each."""
    verdict = Verdict()
    with closing(GrpcDoor(address, access)) as door:

        def replay(ask: Ask) -> StreamResult:
            return call(door, ask, 0.0).heard

        for number, record in enumerate(records, 1):
            judge(record, replay, verdict)
            show(number, verdict)
    return verdict


def judge(record: RequestRecord, replay: Replay, verdict: Verdict) -> None:
    """Asks again, if there is something to compare, and notes what came of it."""
    if record.status == "EMPTY":
        verdict.differences.append(f"request {record.index} ended with OK and without an answer")
        return
    embed = embed_from_json(record.request)
    if embed is not None:
        _judge_vectors(record, embed, replay, verdict)
        return
    request = from_json(record.request)
    reason = _cannot_compare(record, request)
    if reason:
        verdict.not_compared[reason] += 1
        return
    if record.seed is not None:
        request.seed = record.seed
    is_whole = record.status == "OK" and record.finish_reason in WHOLE
    early = None if is_whole or not record.token_ids else len(record.token_ids)
    difference = compare(record, replay(Ask(request, cancel_after=early)), is_whole)
    if difference:
        verdict.differences.append(f"request {record.index} (seed {record.seed}): {difference}")
    else:
        verdict.num_equal += 1


def _judge_vectors(
    record: RequestRecord, request: pb.EmbedRequest, replay: Replay, verdict: Verdict
) -> None:
    """Each text in a call of its own."""
    if record.status != "OK":
        verdict.not_compared[f"no vectors came ({record.status})"] += 1
        return
    vectors: list[bytes] = []
    for text in request.inputs:
        alone = pb.EmbedRequest()
        alone.CopyFrom(request)
        del alone.inputs[:]
        alone.inputs.append(text)
        vectors += replay(Ask(pb.GenerateRequest(), embed=alone)).vectors
    if digest(vectors) == record.vectors:
        verdict.num_equal += 1
    else:
        verdict.differences.append(f"request {record.index}: its texts have other vectors alone")


def compare(record: RequestRecord, alone: StreamResult, is_whole: bool) -> str:
    """What differs, in words; empty if nothing does."""
    if record.status in REFUSED:
        same = alone.status == record.status
        return "" if same else f"{record.status} in the crowd, {alone.status} alone"
    if alone.status not in ("OK", "CANCELLED"):
        return f"{record.num_tokens} tokens in the crowd, {alone.status} alone: {alone.message}"
    tokens = tuple(alone.token_ids)
    if not is_whole:
        tokens = tokens[: record.num_tokens]
    if tokens != record.token_ids:
        return _first_difference(record.token_ids, tokens)
    finish = finish_name(alone.last) if alone.last else ""
    if is_whole and finish != record.finish_reason:
        return f"finish reason {record.finish_reason} in the crowd, {finish or 'none'} alone"
    return ""


def _cannot_compare(record: RequestRecord, request: pb.GenerateRequest) -> str:
    if record.status in REFUSED:
        return ""
    if not record.token_ids:
        return f"no tokens came ({record.finish_reason or record.status})"
    greedy = request.HasField("temperature") and request.temperature == 0
    if record.seed is None and not greedy:
        return f"{record.status} before the server named its seed"
    return ""


def _first_difference(crowd: tuple[int, ...], alone: tuple[int, ...]) -> str:
    pairs = zip(crowd, alone, strict=False)
    at = next((place for place, (a, b) in enumerate(pairs) if a != b), min(len(crowd), len(alone)))
    return (
        f"{len(crowd)} tokens in the crowd, {len(alone)} alone, different from token {at} on "
        f"({crowd[at : at + 3]} and {alone[at : at + 3]})"
    )
