"""`quill bench translate`, `reference` and `embed`: translation models and encoders.

Knows: sources and texts, workloads, columns. Does not know: how backends work.
What backends answer is compared, too: a wrong answer is worth no speed.
"""

import argparse
import json
import random
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import tokenizers

from quill.export.bundle.manifest import Manifest, read_manifest
from quill.loadtest.bench.backends.quill_server import ServerConfig
from quill.loadtest.bench.experiment import (
    Column,
    Entry,
    Experiment,
    Measured,
    Results,
    Turn,
    Workload,
)
from quill.loadtest.bench.models import (
    BACKENDS,
    bundle_of,
    engine_entries,
    num_threads,
)
from quill.loadtest.bench.peers import PEERS_PYTHON, peer_entry
from quill.loadtest.bench.report import LABEL, PEAK_MB, WEIGHTS_MB, run_and_report, speed, speedup
from quill.loadtest.errors import OptionError

DECODINGS = {"greedy, 16 at once": (1, 16), "4 beams, 8 at once": (4, 8)}  # beams, requests
# Random texts: most are as long as sentences, some as pages.
MEDIAN_LENGTH, LENGTH_SIGMA = 24, 0.9
EMBED, GREEDY = "embed", "greedy"


def run_translate(args: argparse.Namespace) -> None:
    bundle = bundle_of(args.bundle, args.precision)
    sources = read_sources(bundle, args.sources, args.limit)
    entries = engine_entries(args, bundle, args.precision.split(","))
    if args.checkpoint is not None:
        entries += [
            peer_entry(
                "ctranslate2",
                *(str(args.checkpoint), kind, num_threads(args), "translate"),
                python=args.peers_python,
            )
            for kind in ("float32", "int8")
        ]
    order = {"do": "translate", "sources": sources}
    workloads = [
        Workload(name, [order | {"num_beams": num_beams, "num_at_once": num_at_once}])
        for name, (num_beams, num_at_once) in DECODINGS.items()
    ]
    columns = [
        column
        for name in DECODINGS
        for column in (translation_speed(name), best_peer(name), same_answers(name))
    ]
    experiment = Experiment(
        "translate",
        f"tokens a second, {len(sources)} sources",
        entries,
        workloads,
        [LABEL, *columns, WEIGHTS_MB, PEAK_MB],
        args.rounds,
    )
    run_and_report(experiment, args.out)


def read_sources(bundle: Path, path: Path, limit: int) -> list[list[int]]:
    """A file's lines as token ids, each with EOS."""
    manifest = read_manifest(bundle)
    if manifest.family != "seq2seq" or manifest.tokenizer is None:
        raise OptionError(f"{bundle} isn't a translation model with a tokenizer")
    eos, context = manifest.special_tokens.eos, manifest.sizes.context
    if eos is None:
        raise OptionError(f"{bundle} has no token that ends a source")
    return [[*ids[: context - 1], eos] for ids in read_lines(bundle, manifest, path)[:limit]]


def read_lines(bundle: Path, manifest: Manifest, path: Path) -> list[list[int]]:
    tokenizer = tokenizers.Tokenizer.from_file(str(bundle / str(manifest.tokenizer)))
    lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    return [tokenizer.encode(line, add_special_tokens=False).ids for line in lines if line]


def tokens_per_s(row: Measured, workload: str) -> float:
    """With the EOS of each answer."""
    turns = row.turns[workload]
    speeds = [sum(len(a) + 1 for a in turn["answers"]) / turn["seconds"] for turn in turns]
    return float(max(speeds))


def translation_speed(workload: str) -> Column:
    return Column(workload, lambda row, _: f"{tokens_per_s(row, workload):.0f}")


def best_peer(workload: str) -> Column:
    """The speed as a share of the fastest backend that isn't Quill's."""

    def cell(row: Measured, results: Results) -> str:
        peers = [each for each in results if each.info.name != "Quill"] or [row]
        return f"{tokens_per_s(row, workload) / max(tokens_per_s(p, workload) for p in peers):.2f}"

    return Column("of the best peer", cell)


def same_answers(workload: str) -> Column:
    """How many answers are the first entry's."""

    def cell(row: Measured, results: Results) -> str:
        pairs = zip(*(each.last(workload)["answers"] for each in (row, results[0])), strict=True)
        return str(sum(ours == theirs for ours, theirs in pairs))

    return Column("same answers", cell)


class Translation(NamedTuple):
    token_ids: list[int]
    text: str


class Question(NamedTuple):
    """A line of `quill eval --answers`."""

    source_ids: list[int]
    reference: str
    max_new_tokens: int
    answers: dict[str, Translation]  # PyTorch's, by the decoding


def run_reference(args: argparse.Namespace) -> None:
    """A served model against PyTorch's answers, which were computed one at a time."""
    questions = read_questions(args.answers)[: args.limit]
    bundle = bundle_of(args.bundle, args.precision)
    if read_manifest(bundle).family != "seq2seq":
        raise OptionError(f"{args.bundle} isn't a translation model")
    options = ("--precision", args.precision, "--max-num-seqs", str(max(args.users, 8)))
    names = list(questions[0].answers)
    orders = {name: _generate_order(questions, name, args.users) for name in names}
    experiment = Experiment(
        "reference",
        f"{len(questions)} sentences, {args.users} users",
        [Entry(ServerConfig(str(bundle), options).command(), "Quill")],
        [Workload(name, [order], once=True) for name, order in orders.items()],
        reference_columns(questions),
        rows=lambda _: names,
        problems=lambda results: _differences(questions, names, results, args.precision),
    )
    run_and_report(experiment)


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


def _generate_order(questions: Sequence[Question], name: str, num_users: int) -> dict[str, Any]:
    return {
        "do": "generate",
        "sources": [each.source_ids for each in questions],
        "max_new_tokens": [each.max_new_tokens for each in questions],
        "num_beams": 1 if name == GREEDY else int(name.split()[0]),
        "num_users": num_users,
    }


def num_equal(questions: Sequence[Question], name: str, turn: Turn) -> int:
    pairs = zip(questions, turn["answers"], strict=True)
    return sum(question.answers[name].token_ids == ids for question, ids in pairs)


def reference_columns(questions: Sequence[Question]) -> list[Column]:
    def bleu(texts: Iterable[str]) -> str:
        import sacrebleu  # of the extra train

        references = [[each.reference for each in questions]]
        return f"{sacrebleu.corpus_bleu(list(texts), references).score:.2f}"

    return [
        Column("", lambda name, _: name),
        Column(
            "equal to PyTorch", lambda name, rs: str(num_equal(questions, name, rs[0].last(name)))
        ),
        Column("BLEU served", lambda name, results: bleu(results[0].last(name)["texts"])),
        Column("BLEU PyTorch", lambda name, _: bleu(q.answers[name].text for q in questions)),
        Column("tokens/s", lambda name, results: f"{results[0].speed(name):.0f}"),
    ]


def _differences(
    questions: Sequence[Question], names: Sequence[str], results: Results, precision: str
) -> list[str]:
    """Only fp32 must be exact."""
    (result,) = results
    different = [n for n in names if num_equal(questions, n, result.last(n)) < len(questions)]
    if not different or precision != "fp32":
        return []
    return [f"served answers differ from PyTorch's: {', '.join(different)}"]


def run_embed(args: argparse.Namespace) -> None:
    bundle = bundle_of(args.bundle, args.precision)
    texts = read_texts(bundle, args.texts, args.limit)
    entries, threads = [], num_threads(args)
    for entry, kind in zip(
        engine_entries(args, bundle, args.precision.split(",")),
        args.precision.split(","),
        strict=True,
    ):
        padded = [sys.executable, "-m", f"{BACKENDS}.padded_onnx", str(bundle), kind]
        entries += [entry, Entry([*padded, threads, str(args.batch)])]
    if args.transformers is not None:
        python = PEERS_PYTHON if PEERS_PYTHON.exists() else Path(sys.executable)
        model = (str(args.transformers), "float32", threads)
        entries.append(peer_entry("transformers", *model, python=python))
    lengths = sorted(map(len, texts))
    middle, total = lengths[len(lengths) // 2], sum(lengths)
    experiment = Experiment(
        EMBED,
        f"{len(texts)} texts, {total} tokens, median {middle}, longest {lengths[-1]}",
        entries,
        [Workload(EMBED, [{"do": EMBED, "texts": texts}], total)],
        embed_columns(len(texts)),
        args.rounds,
        warm_up=True,
    )
    run_and_report(experiment, args.out)


def read_texts(bundle: Path, path: Path | None, limit: int) -> list[list[int]]:
    """A file's lines with the encoder's special tokens; or random texts of mixed lengths."""
    manifest = read_manifest(bundle)
    if manifest.family != "encoder":
        raise OptionError(f"{bundle} isn't an encoder's bundle")
    if path is None:
        return random_texts(manifest, limit)
    if manifest.tokenizer is None:
        raise OptionError(f"{bundle} has no tokenizer, so it can't read {path}. Leave --texts out")
    special = manifest.special_tokens
    before = [special.bos] if manifest.prepend_bos and special.bos is not None else []
    after = [special.eos] if manifest.append_eos and special.eos is not None else []
    most = manifest.sizes.context - len(before) - len(after)
    return [[*before, *i[:most], *after] for i in read_lines(bundle, manifest, path)[:limit]]


def random_texts(manifest: Manifest, num: int) -> list[list[int]]:
    """The same in every run."""
    chance, sizes = random.Random(0), manifest.sizes
    lengths = [
        min(max(2, round(MEDIAN_LENGTH * chance.lognormvariate(0, LENGTH_SIGMA))), sizes.context)
        for _ in range(num)
    ]
    return [[chance.randrange(sizes.vocab_size) for _ in range(length)] for length in lengths]


def embed_columns(num: int) -> list[Column]:
    return [
        LABEL,
        Column("seconds", lambda row, _: f"{row.best(EMBED)['seconds']:.2f}"),
        Column("texts/s", lambda row, _: f"{num / row.best(EMBED)['seconds']:,.0f}"),
        speed(EMBED, "tokens/s"),
        speedup(EMBED),
        Column("least cosine", _least_cosine),
        PEAK_MB,
    ]


def _least_cosine(row: Measured, results: Results) -> str:
    """With the embeddings of the last entry: `transformers`, if it is measured."""
    ours, theirs = (np.array(each.last(EMBED)["vectors"]) for each in (row, results[-1]))
    return f"{least_cosine(ours, theirs):.8f}"


def least_cosine(ours_ND: npt.NDArray[np.float64], theirs_ND: npt.NDArray[np.float64]) -> float:
    lengths_N = np.linalg.norm(ours_ND, axis=1) * np.linalg.norm(theirs_ND, axis=1)
    return float(((ours_ND * theirs_ND).sum(axis=1) / lengths_N).min())
