"""Sends every request of a run again, alone, and compares the answers.

Knows: records, calls. Does not know: how the load was made.
The same seed must give the same tokens alone and batched. A request that was cancelled or ended
early must have a prefix of its answer alone; one that was rejected must be rejected again.
Embeddings must be the same bits. Whatever the load's protocol was, the replay is over gRPC.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field

from quill.loadtest.errors import DifferentAnswerError
from quill.loadtest.protocols.grpc import GrpcClient
from quill.loadtest.workload.call import (
    StreamResult,
    call,
    digest,
    embed_from_json,
    finish_name,
    from_json,
)
from quill.loadtest.workload.records import RequestRecord
from quill.loadtest.workload.request import LoadRequest
from quill.protos import generation_pb2 as pb
from quill.server.client.access import Access

WHOLE = ("EOS", "LENGTH", "STOP")
REJECTED = ("INVALID_ARGUMENT", "FAILED_PRECONDITION")
_SHOWN = 5

Replay = Callable[[LoadRequest], StreamResult]


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
    """One after the other. `show` is called after each."""
    verdict = Verdict()
    with closing(GrpcClient(address, access)) as client:

        def replay(load: LoadRequest) -> StreamResult:
            return call(client, load, 0.0).result

        for number, record in enumerate(records, 1):
            judge(record, replay, verdict)
            show(number, verdict)
    return verdict


def judge(record: RequestRecord, replay: Replay, verdict: Verdict) -> None:
    """Sends the request again, if there is something to compare, and notes the result."""
    if record.status == "EMPTY":
        verdict.differences.append(f"request {record.index} ended with OK and without an answer")
        return
    embed = embed_from_json(record.request)
    if embed is not None:
        _judge_embeddings(record, embed, replay, verdict)
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
    difference = compare(record, replay(LoadRequest(request, cancel_after=early)), is_whole)
    if difference:
        verdict.differences.append(f"request {record.index} (seed {record.seed}): {difference}")
    else:
        verdict.num_equal += 1


def _judge_embeddings(
    record: RequestRecord, request: pb.EmbedRequest, replay: Replay, verdict: Verdict
) -> None:
    """Each text in a request of its own."""
    if record.status != "OK":
        verdict.not_compared[f"no embeddings came ({record.status})"] += 1
        return
    embeddings: list[bytes] = []
    for text in request.inputs:
        alone = pb.EmbedRequest()
        alone.CopyFrom(request)
        del alone.inputs[:]
        alone.inputs.append(text)
        embeddings += replay(LoadRequest(pb.GenerateRequest(), embed=alone)).embeddings
    if digest(embeddings) == record.embeddings:
        verdict.num_equal += 1
    else:
        verdict.differences.append(f"request {record.index}: its texts have other embeddings alone")


def compare(record: RequestRecord, alone: StreamResult, is_whole: bool) -> str:
    """A description of the difference; empty if there is none."""
    if record.status in REJECTED:
        same = alone.status == record.status
        return "" if same else f"{record.status} in the load, {alone.status} alone"
    if alone.status not in ("OK", "CANCELLED"):
        return f"{record.num_tokens} tokens in the load, {alone.status} alone: {alone.message}"
    tokens = tuple(alone.token_ids)
    if not is_whole:
        tokens = tokens[: record.num_tokens]
    if tokens != record.token_ids:
        return _first_difference(record.token_ids, tokens)
    finish = finish_name(alone.last) if alone.last else ""
    if is_whole and finish != record.finish_reason:
        return f"finish reason {record.finish_reason} in the load, {finish or 'none'} alone"
    return ""


def _cannot_compare(record: RequestRecord, request: pb.GenerateRequest) -> str:
    if record.status in REJECTED:
        return ""
    if not record.token_ids:
        return f"no tokens came ({record.finish_reason or record.status})"
    greedy = request.HasField("temperature") and request.temperature == 0
    if record.seed is None and not greedy:
        return f"{record.status} before the server reported its seed"
    return ""


def _first_difference(loaded: tuple[int, ...], alone: tuple[int, ...]) -> str:
    pairs = zip(loaded, alone, strict=False)
    at = next((place for place, (a, b) in enumerate(pairs) if a != b), min(len(loaded), len(alone)))
    return (
        f"{len(loaded)} tokens in the load, {len(alone)} alone, different from token {at} on "
        f"({loaded[at : at + 3]} and {alone[at : at + 3]})"
    )
