"""`quill doctor`: what this machine has, whether a bundle computes here what it should, how fast.

Knows: the stages, the verdict, exit codes, the report. Does not know: how anything is measured.
"""

import argparse
import dataclasses
import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from quill.export.bundle.manifest import Graphs, Manifest, read_manifest
from quill.export.operators.library import PLAIN, kernels, library_path
from quill.export.precisions import PRECISIONS, UNROUNDED, Tolerance
from quill.server.doctor.difference import Difference, difference
from quill.server.doctor.graph_cost import count_cost
from quill.server.doctor.machine import Others, describe_machine, without_directories
from quill.server.doctor.peaks import Rates
from quill.server.doctor.probe import MAX_PROMPT, NUM_CUTS, Probe
from quill.server.doctor.reference import compute_elsewhere
from quill.server.doctor.speed import Work, best, measure_speed, peak_of, works_of
from quill.server.errors import StartError
from quill.server.loading.choices import choose_graphs, choose_threads, how_to_add
from quill.server.loading.engine_factory import open_bundle
from quill.server.loading.loader import require_operators
from quill.server.serve.prepare import prepared_bundle

FORMAT_VERSION = 1
WRONG, VARIANT = 3, 4  # exit codes
PLAIN_TOKENS = 48  # plain kernels take a second for a few billion products
DECODED_TOKENS = 24
MAX_OTHERS = 0.05  # of the cores' time: speeds are the machine's own
SAME = Tolerance(worst=0.0, mean=0.0)
CPU_REFERENCES = ("fp32", "quill8", "quill4")


@dataclass(frozen=True)
class Check:
    """Something compared with what it should be. `found` None: there was nothing to compare with,
    and `words` says why."""

    name: str
    found: Difference | None
    allowed: Tolerance
    should_be_same: bool  # bit for bit
    words: str = ""

    @property
    def is_right(self) -> bool:
        return self.found is None or self.found.is_within(self.allowed)

    @property
    def is_same(self) -> bool:
        return self.found is None or not self.should_be_same or self.found.worst == 0


@dataclass(frozen=True)
class Verdict:
    words: str
    exit_code: int


def run(args: argparse.Namespace) -> None:
    report: dict[str, Any] = {"format": FORMAT_VERSION}
    machine = describe_machine()
    report["machine"] = machine
    _show("this machine", machine.items())
    require_operators()
    num_threads = choose_threads(args.threads)
    works: list[Work] = []
    if args.source is None:
        others, peak = Others(), peak_of("cpu", num_threads)
        verdict = Verdict(
            "The operators work here. Give a bundle, or what `quill serve` takes, to check it.", 0
        )
    else:
        directory = prepared_bundle(args.source, args.device, args.precision)
        manifest = read_manifest(directory)
        graphs = choose_graphs(manifest, args.device, args.precision).graphs
        report["bundle"] = _described(manifest, graphs)
        _show("the bundle", _shown(manifest, graphs))
        _tell("loading the bundle")
        probe = Probe(open_bundle(directory, graphs.precision), num_threads)
        checks = list(_checked(directory, manifest, probe, num_threads))
        report["checks"] = [_plain(check) for check in checks]
        _show("what it computes", ((check.name, _words(check)) for check in checks))
        verdict = judge(checks, graphs)
        others, peak = Others(), peak_of(graphs.device, num_threads)
        works = _works(directory, manifest, probe)
    rates = measure_speed(works, peak, _tell)
    report["peaks"] = [each._asdict() for each in rates]
    report["threads"] = num_threads
    report["speed"] = {work.name: _speed(work) for work in works}
    report["others"] = others.share()
    report["verdict"] = dataclasses.asdict(verdict)
    _show(f"speed, with {num_threads} threads", _speed_rows(works, rates))
    if report["others"] > MAX_OTHERS:
        print(f"\nOther programs took {report['others']:.0%} of the cores: measure again without.")
    print(f"\n{verdict.words}")
    if args.json is not None:
        _write(args.json, report)
    if verdict.exit_code:
        sys.exit(verdict.exit_code)


def judge(checks: Iterable[Check], graphs: Graphs) -> Verdict:
    checks = list(checks)
    if wrong := [check.name for check in checks if not check.is_right]:
        return Verdict(
            f"WRONG: {graphs.precision} on this machine doesn't compute what it should "
            f"({', '.join(wrong)}). Don't serve this bundle here, and send the report (--json).",
            WRONG,
        )
    if variant := [check.name for check in checks if not check.is_same]:
        return Verdict(
            f"Right within the tolerance, but not batch-invariant ({', '.join(variant)}): a "
            "sequence's tokens can depend on what else is in the batch, so the same seed can give "
            "other tokens.",
            VARIANT,
        )
    if any(check.found is None for check in checks):
        return Verdict("Batch-invariant here. Not everything could be compared: see above.", 0)
    return Verdict("Sound: right, and batch-invariant.", 0)


def _checked(
    directory: Path, manifest: Manifest, probe: Probe, num_threads: int
) -> Iterator[Check]:
    graphs = probe.graphs
    own = PRECISIONS[graphs.precision].tolerance
    for name, precision, chosen, num_tokens, allowed in _references(manifest, graphs):
        if not precision:
            yield Check(name, None, allowed, False, chosen)
            continue
        _tell(f"computing {num_tokens} tokens with {name}")
        expected = compute_elsewhere(directory, precision, num_tokens, num_threads, chosen)
        found = difference(probe.whole(num_tokens), expected)
        yield Check(name, found, allowed, should_be_same=False)
    if not probe.is_encoder:
        _tell("computing a prompt in chunks, and token by token")
        whole = probe.whole(MAX_PROMPT)
        cuts = difference(probe.chunked(MAX_PROMPT), np.tile(whole, (NUM_CUTS, 1)))
        yield Check("chunked prefill", cuts, own, should_be_same=True)
        decoded = probe.decoded(MAX_PROMPT, MAX_PROMPT - DECODED_TOKENS)
        yield Check("decode", difference(decoded, whole), own, should_be_same=True)
    _tell("computing sequences alone and in batches")
    for num, results, together in probe.batched():
        found = difference(results, together)
        yield Check(f"batch of {num}", found, own, should_be_same=True)


def _references(
    manifest: Manifest, graphs: Graphs
) -> Iterator[tuple[str, str, str, int, Tolerance]]:
    """What the bundle's results are compared with: a name, a precision on the CPU, its kernels, how
    many tokens, what is allowed. No precision: there is none, and why."""
    on_cpu = {each.precision for each in manifest.graphs if each.device == "cpu"}
    others = [name for name in CPU_REFERENCES if name in on_cpu]
    if graphs.device == "cuda":
        own = PRECISIONS[graphs.precision].tolerance
        if not others:
            why = f"the bundle has nothing to compare with: {how_to_add('fp32')}"
            yield "the CPU's results", "", why, 0, own
            return
        allowed = own if others[0] == "fp32" else UNROUNDED
        yield f"{others[0]} on the CPU", others[0], "", MAX_PROMPT, allowed
        return
    if kernels(library_path()) == PLAIN:
        why = "this processor has no others to compare with"
        yield "plain kernels", "", why, 0, SAME
    else:
        yield "plain kernels", graphs.precision, PLAIN, PLAIN_TOKENS, SAME
    if graphs.precision != "fp32" and "fp32" in on_cpu:
        yield "fp32 graphs", "fp32", "", MAX_PROMPT, UNROUNDED


def _works(directory: Path, manifest: Manifest, probe: Probe) -> list[Work]:
    name = probe.graphs.decoder or probe.graphs.encoder
    assert name is not None
    cache_bytes = manifest.cache_bytes_per_token(probe.graphs.cache_type)
    return works_of(probe, count_cost(directory / name), cache_bytes)


def _described(manifest: Manifest, graphs: Graphs) -> dict[str, Any]:
    kept = ("name", "family", "onnxruntime", "exporter", "weights_sha256")
    described = {name: getattr(manifest, name) for name in kept}
    described |= dataclasses.asdict(manifest.sizes) | dataclasses.asdict(graphs)
    if graphs.verification is not None:
        del described["verification"]["text"]  # it may be a file's name
    return described


def _shown(manifest: Manifest, graphs: Graphs) -> Iterator[tuple[str, str]]:
    yield "name", manifest.name
    yield "graphs", f"{graphs.precision} on {graphs.device}, {graphs.quantization or 'plain'}"
    measured = graphs.verification
    if measured is None:
        yield "verified at export", "no"
        return
    rise = measured.perplexity / measured.reference_perplexity - 1
    yield (
        "verified at export",
        f"perplexity {rise:+.2%}, worst difference {measured.worst_difference:.2g}",
    )


def _words(check: Check) -> str:
    if check.found is None:
        return f"not compared: {check.words}"
    sound = "" if check.is_right and check.is_same else "  <-- "
    if not check.is_right:
        return f"{check.found}{sound}{check.allowed.worst:g} and {check.allowed.mean:g} are allowed"
    return f"{check.found}{sound}" + ("the same bits are wanted" if sound else "")


def _plain(check: Check) -> dict[str, Any]:
    found = None if check.found is None else check.found._asdict()
    outcome = {"name": check.name, "right": check.is_right, "same": check.is_same}
    return outcome | {"found": found, "words": check.words}


def _speed(work: Work) -> dict[str, Any]:
    return {
        "tokens_s": work.tokens_s,
        "ms": [1e3 * seconds for seconds, _ in work.turns],
        "bytes": work.num_bytes,
        "products": work.num_products,
        "share_of_reading": work.share_of_reading,
        "share_of_multiplying": work.share_of_multiplying,
    }


def _speed_rows(works: Iterable[Work], rates: Sequence[Rates]) -> Iterator[tuple[str, str]]:
    most, usual = best(rates), Rates(*map(median, zip(*rates, strict=True)))
    yield "memory", f"{most.bytes / 1e9:.0f} GB/s at most, {usual.bytes / 1e9:.0f} usually"
    if most.products:
        products = f"{most.products / 1e9:,.0f} at most, {usual.products / 1e9:,.0f} usually"
        yield "multiplying 8 bits", f"{products}, in billions a second"
    for work in works:
        words = f"{work.tokens_s:,.0f} tokens/s, {1e3 * work.seconds:.1f} ms: "
        words += f"{work.share_of_reading:.0%} of memory's speed"
        share = work.share_of_multiplying
        yield work.name, words + ("" if share is None else f", {share:.0%} of the multipliers'")


def _show(title: str, rows: Iterable[tuple[str, str]]) -> None:
    print(f"\n{title}" if title != "this machine" else title)
    for name, value in rows:
        print(f"  {name:<20}{value}", flush=True)


def _tell(words: str) -> None:
    print(f"quill doctor: {words}", file=sys.stderr, flush=True)


def _write(path: Path, report: Mapping[str, Any]) -> None:
    text = without_directories(json.dumps(_finite(report), indent=2, allow_nan=False))
    try:
        path.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise StartError(f"can't write {path}: {error.strerror}") from error


def _finite(value: Any) -> Any:
    """JSON has no infinity and no NaN."""
    if isinstance(value, Mapping):
        return {name: _finite(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(each) for each in value]
    if isinstance(value, float) and not abs(value) < float("inf"):
        return str(value)
    return value
