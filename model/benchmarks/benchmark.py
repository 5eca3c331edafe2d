"""`quill eval`: benchmarks with --tasks, on a checkpoint or a server; else a run's held-out data.

Knows: the arguments, the order of work, the report. Does not know: how answers are judged.
"""

import argparse
import contextlib
import itertools
import json
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console
from rich.table import Table

from quill.model.benchmarks.backend import Backend, Sampling
from quill.model.benchmarks.items import Item, read_user_items
from quill.model.benchmarks.metrics import Figure, summarize
from quill.model.benchmarks.sandbox import isolation
from quill.model.benchmarks.tasks import GROUPS, TASKS, Judgement, Settings, Task
from quill.model.errors import ConfigError, CorpusError, ModelError
from quill.model.progress import Display


@dataclass(frozen=True)
class Result:
    """A task's figures. Items that ended with an error count as wrong, but not in a perplexity."""

    task: str
    shots: int
    figures: dict[str, Figure]
    num_items: int
    num_errors: int
    seconds: float


def run(args: argparse.Namespace) -> None:
    if (args.checkpoint is None) == (args.server is None):
        raise ConfigError("give one of them: a checkpoint, or --server with a server's address")
    if args.tasks is None:
        if args.server is not None:
            raise ConfigError(f"--server needs --tasks, some of {', '.join([*TASKS, *GROUPS])}")
        from quill.model.evaluation import evaluate

        evaluate.run(args)
        return
    tasks = _chosen_tasks(args)
    settings = _settings(args)
    out = args.out or Path("evals") / time.strftime("%Y%m%d-%H%M%S")
    backend = _open_backend(args)  # before earlier results are replaced
    with contextlib.ExitStack() as stack:
        answers = stack.enter_context(_open(out / "answers.jsonl"))
        report = stack.enter_context(_open(out / "results.json"))
        results = []
        for task in tasks:
            shots = task.shots if args.shots is None else args.shots
            found = list(itertools.islice(_read(task, args.data, shots), args.limit))
            results.append(run_task(task, found, shots, backend, settings, answers))
        _show(results, args, out)
        json.dump(_description(results, args, settings), report, indent=2)
        report.write("\n")


def _chosen_tasks(args: argparse.Namespace) -> list[Task]:
    names = [part for name in args.tasks.split(",") for part in GROUPS.get(name, (name,))]
    unknown = [name for name in names if name not in TASKS]
    if unknown:
        raise ConfigError(f"there is no task {unknown[0]!r}; there are {', '.join(TASKS)}, bfcl")
    tasks = [TASKS[name] for name in names]
    running = [task.name for task in tasks if task.runs_code]
    if running and not args.allow_code_execution:
        raise ConfigError(
            f"{running[0]} runs programs that the model wrote on this machine (kept in by: "
            f"{isolation()}). Give --allow-code-execution to agree"
        )
    for task in tasks:
        if args.shots is not None and not 0 <= args.shots <= task.max_shots:
            raise ConfigError(f"--shots is {args.shots}; {task.name} has 0 to {task.max_shots}")
    if args.limit is not None and args.limit < 1:
        raise ConfigError(f"--limit is {args.limit}; it must be at least 1")
    return tasks


def _settings(args: argparse.Namespace) -> Settings:
    for name in ("samples", "max_new_tokens", "concurrency"):
        if getattr(args, name) < 1:
            flag = name.replace("_", "-")
            raise ConfigError(f"--{flag} is {getattr(args, name)}; it must be at least 1")
    if args.samples > 1 and args.temperature == 0:
        raise ConfigError(
            "--samples above 1 needs a --temperature: greedy answers are all the same"
        )
    sampling = Sampling(
        max_new_tokens=args.max_new_tokens, temperature=args.temperature, seed=args.seed
    )
    return Settings(
        is_chat=args.chat, samples=args.samples, tool_choice=args.tool_choice, sampling=sampling
    )


def _open_backend(args: argparse.Namespace) -> Backend:
    """Imports what is needed: a server's benchmarks do without torch."""
    if args.server is None:
        from quill.model.benchmarks.torch_backend import TorchBackend
        from quill.model.importers.import_weights import open_checkpoint
        from quill.model.training.distributed import choose_device

        return TorchBackend(open_checkpoint(args.checkpoint), choose_device(args.device))
    from quill.model.benchmarks.server_backends import GrpcBackend, HttpBackend
    from quill.server.client.access import read_access

    unset = {"cert": None, "key": None, "insecure": False}
    access = read_access(argparse.Namespace(**vars(args) | unset))
    if args.server.startswith(("http://", "https://")):
        return HttpBackend(args.server, access, args.concurrency, args.model)
    return GrpcBackend(args.server, access, args.concurrency)


def _read(task: Task, data: Path | None, shots: int) -> Iterator[Item]:
    """The user's file if there is one: prompts are used as they are."""
    path = None if data is None else data / f"{task.name}.jsonl"
    if path is not None and path.exists():
        return read_user_items(path, task.kind)
    return task.read(task.wheel, task.member, shots)


def run_task(
    task: Task,
    items: Sequence[Item],
    shots: int,
    backend: Backend,
    settings: Settings,
    answers: TextIO,
) -> Result:
    """An error before any answer ends the run: the next items would fail, too."""
    if not items:
        raise CorpusError(f"{task.name} has no items")

    def judge(item: Item) -> Judgement | ModelError:
        try:
            return task.judge(item, backend, task, settings)
        except ModelError as error:
            return error

    found: list[Judgement] = []
    errors: list[ModelError] = []
    started = time.monotonic()
    pool = ThreadPoolExecutor(backend.max_concurrency)
    try:
        with Display(task.name, len(items)) as display:
            for item, each in zip(items, pool.map(judge, items), strict=True):
                if isinstance(each, ModelError):
                    errors.append(each)
                    if not found:
                        raise each
                else:
                    found.append(each)
                print(_line(task, item, each), file=answers, flush=True)
                display.advance()
    finally:
        pool.shutdown(cancel_futures=True)
    seconds = time.monotonic() - started
    figures = {name: _figure(name, found, len(errors)) for name in task.metrics}
    return Result(task.name, shots, figures, len(items), len(errors), seconds)


def _figure(metric: str, found: Sequence[Judgement], num_errors: int) -> Figure:
    values = [each.scores[metric] for each in found]
    return summarize(metric, values + [0.0] * (num_errors if metric != "perplexity" else 0))


def _line(task: Task, item: Item, each: Judgement | ModelError) -> str:
    judged = {"error": str(each)} if isinstance(each, ModelError) else each._asdict()
    line = {"task": task.name, "id": item.id, **judged, "item": asdict(item)}
    return json.dumps(line, ensure_ascii=False)


def _open(path: Path) -> TextIO:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return path.open("w", encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"{path} can't be written: {error.strerror}; give another --out"
        ) from error


def _show(results: Sequence[Result], args: argparse.Namespace, out: Path) -> None:
    title = "95% intervals: Wilson's for shares of items, else by bootstrap over items"
    table = Table("task", "metric", "value", "95%", "items", "errors", "seconds", caption=title)
    for result in results:
        for name, figure in result.figures.items():
            form = "{:.2f}" if name == "perplexity" else "{:.1%}"
            value, low, high = (form.format(each) for each in figure[:3])
            interval, seconds = f"{low.rstrip('%')}–{high}", f"{result.seconds:.1f}"
            counts = str(result.num_items), str(result.num_errors)
            table.add_row(result.task, name, value, interval, *counts, seconds)
    console = Console(highlight=False, soft_wrap=True)
    console.print(table)
    if any(TASKS[result.task].runs_code for result in results):
        console.print(f"Programs ran with: {isolation()}")
    console.print(f"{out} has results.json, and answers.jsonl with every answer", markup=False)


def _description(
    results: Sequence[Result], args: argparse.Namespace, settings: Settings
) -> dict[str, Any]:
    return {
        "model": str(args.server or args.checkpoint),
        "settings": asdict(settings),
        "limit": args.limit,
        "tasks": [
            asdict(each) | {"figures": {name: f._asdict() for name, f in each.figures.items()}}
            for each in results
        ],
    }
