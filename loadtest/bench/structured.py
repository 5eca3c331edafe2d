"""`quill bench structured`: are constrained answers valid, batch-invariant, and as fast as others?

Knows: the server's options, rows and bars. Does not know: how constraints are enforced.
"""

import argparse
from collections.abc import Callable

from quill.export.bundle.manifest import read_manifest
from quill.loadtest.bench.backends.quill_server import ServerConfig
from quill.loadtest.bench.experiment import Entry, Experiment, Results, Turn, Workload
from quill.loadtest.bench.models import bundle_of
from quill.loadtest.bench.report import BAR_COLUMNS, BarRow, numbers, run_and_report
from quill.loadtest.errors import OptionError

PARTS = ("answers", "speed", "adversarial")
NUM_USERS = 32


def run(args: argparse.Namespace) -> None:
    parts = args.parts.split(",")
    unknown = sorted({*parts} - {*PARTS})
    if unknown:
        raise OptionError(f"--parts has {', '.join(unknown)}; there are {', '.join(PARTS)}")
    bundle = bundle_of(args.bundle, getattr(args, "precision", None))
    manifest = read_manifest(bundle)
    if manifest.tokenizer is None or not manifest.stop_ids or manifest.chat_template is None:
        need = "a model with a tokenizer, a chat template and an end of text"
        raise OptionError(f"{bundle} has no structured output: give {need}")
    max_new_tokens = min(256, manifest.sizes.context // 2)
    run_and_report(structured_experiment(args, str(bundle), parts, max_new_tokens), args.out)


def structured_experiment(
    args: argparse.Namespace, bundle: str, parts: list[str], max_new_tokens: int
) -> Experiment:
    """A new server for each part: none finds prompts or grammars that another has cached."""
    options = ["--max-num-seqs", str(NUM_USERS)]
    options += [] if args.precision is None else ["--precision", args.precision]
    options += [] if args.threads is None else ["--threads", str(args.threads)]
    more = {"answers": [], "speed": ["--no-prefix-cache"], "adversarial": []}
    answers = {"do": "answers", "num_seeds": args.seeds, "num_alone": args.alone}
    answers["max_new_tokens"] = max_new_tokens
    orders = {
        "answers": answers | {"num_users": NUM_USERS},
        "speed": {"do": "speed", "num_users": NUM_USERS},
        "adversarial": {"do": "adversarial"},
    }
    configs = {part: ServerConfig(bundle, (*options, *more[part])) for part in parts}
    return Experiment(
        "structured",
        "structured output",
        [Entry(config.command("quill_structured"), part) for part, config in configs.items()],
        [Workload(part, [orders[part]], once=part != "speed", entries=(part,)) for part in parts],
        BAR_COLUMNS,
        args.rounds,
        rows=rows,
        problems=problems,
    )


def rows(results: Results) -> list[BarRow]:
    return [row for each in results for row in ROWS[each.label](each.turns[each.label])]


def problems(results: Results) -> list[str]:
    turns = {each.label: each.last(each.label) for each in results}
    failed = turns.get("adversarial", {}).get("failed", {})
    found: list[str] = turns.get("answers", {}).get("problems", [])
    return [*found, *(f"{name}: {message}" for name, message in failed.items())]


def _answer_rows(turns: list[Turn]) -> list[BarRow]:
    (turn,) = turns
    statuses = ", ".join(f"{num} {name}" for name, num in turn["statuses"].items())
    valid = f"{turn['num_valid']} of {turn['num_ended']}"
    equal = f"{turn['num_equal']} of {turn['num_alone']}"
    return [
        BarRow("answers", "all OK", str(turn["num"]), statuses),
        BarRow("valid, of those that ended", "all", valid, "by jsonschema"),
        BarRow("the same alone", "all", equal, "tokens and finish reason"),
    ]


def _speed_rows(turns: list[Turn]) -> list[BarRow]:
    """Of each side the best of all rounds."""
    found = []
    for name, label in (("schemas", "fifty schemas"), ("story", "one long text")):
        free, constrained = (max(rates) for rates in zip(*(t[name] for t in turns), strict=True))
        rounds = numbers([turn[name][1] / turn[name][0] for turn in turns])
        more = f"{constrained:.0f} and {free:.0f} tokens/s; rounds {rounds}"
        ratio = f"{constrained / free:.2f}"
        found.append(BarRow(f"speed against unconstrained, {label}", "≥ 0.9", ratio, more))
    without, beside = (min(gaps) for gaps in zip(*(turn["gap"] for turn in turns), strict=True))
    rounds = numbers([turn["gap"][1] / turn["gap"][0] for turn in turns])
    more = f"{1000 * beside:.0f} and {1000 * without:.0f} ms; rounds {rounds}"
    name = "p95 gap of others, half of the batch constrained"
    return [*found, BarRow(name, "≤ 1.1", f"{beside / without:.2f}", more)]


def _adversarial_rows(turns: list[Turn]) -> list[BarRow]:
    (turn,) = turns
    rejected, followed = turn["rejected_s"], turn["first_token_s"]
    times_s, extra = rejected | followed, turn["extra_steps"]
    slowest = max(times_s, key=lambda name: times_s[name])
    worst = max(extra, key=lambda name: extra[name])
    more = f"{len(rejected)} rejected, {len(followed)} followed"
    step = f"{worst}; a step has {1000 * turn['step_s']:.0f} ms"
    return [
        BarRow("adversarial constraints", "", str(len(extra)), more),
        BarRow("the slowest, s", "≤ 1", f"{times_s[slowest]:.2f}", slowest),
        BarRow("others' longest gap, extra steps", "≤ 1", f"{extra[worst]:.1f}", step),
    ]


ROWS: dict[str, Callable[[list[Turn]], list[BarRow]]] = {
    "answers": _answer_rows,
    "speed": _speed_rows,
    "adversarial": _adversarial_rows,
}
