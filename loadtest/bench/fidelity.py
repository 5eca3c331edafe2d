"""`quill bench reference`: a served translator against what PyTorch said alone, line by line.

Knows: the answers that `quill eval --answers` wrote, a server of our own, BLEU.
Does not know: models. Everything is asked by many users at once; PyTorch was asked alone.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import sacrebleu
from rich import box
from rich.console import Console
from rich.table import Table

from quill.export.bundle.manifest import read_manifest
from quill.loadtest.environment.own_server import own_server
from quill.loadtest.errors import LoadtestError, OptionError
from quill.loadtest.results.progress import Line
from quill.loadtest.workload.closed_loop import IsOver, run_users
from quill.protos import generation_pb2 as pb
from quill.protos import generation_pb2_grpc as pb_grpc

GREEDY = "greedy"


@dataclass(frozen=True)
class Translation:
    """One line's translation."""

    token_ids: list[int]
    text: str


@dataclass(frozen=True)
class Question:
    source_ids: list[int]
    reference: str
    max_new_tokens: int
    answers: dict[str, Translation]  # PyTorch's, by the way of decoding


@dataclass(frozen=True)
class DecodingResult:
    """All questions, decoded one way."""

    name: str
    served: list[Translation]
    alone: list[Translation]
    references: list[str]
    seconds: float

    @property
    def num_equal(self) -> int:
        pairs = zip(self.served, self.alone, strict=True)
        return sum(served.token_ids == alone.token_ids for served, alone in pairs)

    @property
    def tokens_a_second(self) -> float:
        return sum(len(said.token_ids) for said in self.served) / self.seconds

    def bleu(self, said: Sequence[Translation]) -> float:
        texts = [each.text for each in said]
        return float(sacrebleu.corpus_bleu(texts, [self.references]).score)


def run(args: argparse.Namespace) -> None:
    questions = read_questions(args.answers)[: args.limit]
    if read_manifest(args.bundle).family != "seq2seq":
        raise OptionError(f"{args.bundle} isn't a translation model")
    options = ["--precision", args.precision, "--max-num-seqs", str(max(args.users, 8))]
    with (
        tempfile.TemporaryDirectory() as logs,
        own_server(Path(logs) / "server.log", args.bundle, *options) as server,
    ):
        names = list(questions[0].answers)
        ways = [ask_all(server.address, questions, name, args.users) for name in names]
    Console(highlight=False).print(table(ways, args.users))
    different = [way for way in ways if way.num_equal < len(questions)]
    if different and args.precision == "fp32":
        told = ", ".join(way.name for way in different)
        raise LoadtestError(f"served answers differ from PyTorch's: {told}")


def read_questions(path: Path) -> list[Question]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        questions = [_read_question(json.loads(line)) for line in lines]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise OptionError(f"{path} isn't a file of `quill eval --answers`: {error}") from error
    if not questions:
        raise OptionError(f"{path} has no lines")
    return questions


def _read_question(line: dict[str, Any]) -> Question:
    answers = {name: Translation(**answer) for name, answer in line["answers"].items()}
    return Question(line["source_ids"], line["reference"], line["max_new_tokens"], answers)


def ask_all(
    address: str, questions: Sequence[Question], name: str, num_users: int
) -> DecodingResult:
    """Each user takes the next question as soon as it has an answer."""
    served: list[Translation | None] = [None] * len(questions)
    numbers = iter(range(len(questions)))  # one step of it is one for all threads
    line = Line()
    start = time.perf_counter()
    with grpc.insecure_channel(address) as channel:
        stub = pb_grpc.TextGenerationStub(channel)

        def user(_: int, is_over: IsOver) -> None:
            for number in numbers:
                if is_over():
                    return
                served[number] = _ask(stub, questions[number], name, number + 1)
                line.show(f"{name}: {len(served) - served.count(None)} of {len(served)}")

        run_users(user, num_users)
    line.end()
    return DecodingResult(
        name,
        [said for said in served if said is not None],
        [question.answers[name] for question in questions],
        [question.reference for question in questions],
        time.perf_counter() - start,
    )


def _ask(stub: pb_grpc.TextGenerationStub, question: Question, name: str, line: int) -> Translation:
    request = pb.GenerateRequest(
        prompt_ids=pb.TokenIds(ids=question.source_ids), max_new_tokens=question.max_new_tokens
    )
    if name == GREEDY:
        request.temperature = 0.0
    else:
        request.num_beams = int(name.split()[0])
    try:
        first = stub.Generate(request).sequences[0]
    except grpc.RpcError as error:
        raise LoadtestError(
            f"line {line} got {error.code().name}: {error.details()}. Are these the answers of "
            "another model?"
        ) from error
    return Translation(list(first.token_ids), first.text)


def table(ways: Sequence[DecodingResult], num_users: int) -> Table:
    num = len(ways[0].references)
    shown = Table(title=f"{num} sentences, {num_users} users at once", box=box.SIMPLE_HEAD)
    shown.add_column("")
    for column in ("equal to PyTorch alone", "BLEU served", "BLEU PyTorch", "tokens/s"):
        shown.add_column(column, justify="right")
    for way in ways:
        shown.add_row(
            way.name,
            f"{way.num_equal}",
            f"{way.bleu(way.served):.2f}",
            f"{way.bleu(way.alone):.2f}",
            f"{way.tokens_a_second:.0f}",
        )
    return shown
