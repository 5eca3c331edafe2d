"""Breaks the product on purpose, one line at a time, and sees whether the tests notice.

`python -m tests.mutants [--only NAME]` copies the tree, applies each mutant of the table to the
copy and runs the tests that should catch it. Not a part of `make test`: it takes minutes. A mutant
that survives, or whose text isn't found any more, is an error.

Knows: the table, git's list of files. Does not know: what the mutated code does.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
MAX_S = 900  # of one mutant's tests: a mutant may hang


class Mutant(NamedTuple):
    name: str
    path: str
    old: str
    new: str
    tests: str  # what pytest is given, within tests/server


# ruff: noqa: E501
# fmt: off
MUTANTS = (
    Mutant("block-refcount", "server/engine/block_pool.py", "self._ref_counts[block] -= 1", "self._ref_counts[block] -= 0", "engine/test_block_pool.py"),
    Mutant("copy-on-write", "server/engine/block_pool.py", "return self._ref_counts[block] > 1", "return self._ref_counts[block] > 2", "engine/test_engine.py engine/test_scheduler.py"),
    Mutant("prefix-scope", "server/engine/block_pool.py", "next_hash(scope_hash(scope), tokens)", "next_hash(scope_hash(\"\"), tokens)", "engine/test_block_pool.py engine/test_engine.py"),
    Mutant("evicted-copy", "server/disk_cache/disk_cache.py", "return cached.is_valid", "return True", "disk_cache/test_disk_cache.py"),
    Mutant("seed-mixing", "server/sampling/sampler.py", "_splitmix64(states, np.array(positions, np.uint64))", "_splitmix64(states, np.zeros(len(positions), np.uint64))", "sampling/test_sampler.py"),
    Mutant("sequence-seed", "server/engine/sequence.py", "seed = sequence_seed(request.seed, index)", "seed = request.seed", "engine/test_engine.py"),
    Mutant("repetition-penalty", "server/sampling/sampler.py", "        sampling.repetition_penalty,\n", "        1 / sampling.repetition_penalty,\n", "sampling/test_sampler.py"),
    Mutant("top-p", "server/sampling/sampler.py", "sampling.top_p * sums_C[num_kept - 1])) + 1", "sampling.top_p * sums_C[num_kept - 1])) + 2", "sampling/test_sampler.py"),
    Mutant("min-p", "server/sampling/sampler.py", "        sampling.min_p,\n", "        0.0,\n", "sampling/test_sampler.py"),
    Mutant("grammar-mask", "server/sampling/sampler.py", "0 if mask is None else mask.ctypes.data", "0", "engine/test_constraints.py sampling/test_sampler.py"),
    Mutant("length-penalty", "server/sampling/beam_search.py", "return logprob / math.pow(length, self._beams.length_penalty)", "return logprob / math.pow(length, 1.0)", "sampling/test_beam_search.py"),
    Mutant("logprobs-raw", "server/engine/step.py", "reports = position_logprobs(\n        logits_LV,", "reports = position_logprobs(\n        logits_LV / 2,", "engine/test_engine.py -k logprobs"),
    Mutant("deadline-running", "server/engine/engine.py", "if deadline_s is not None and deadline_s <= now_s:", "if deadline_s is not None and deadline_s <= 0:", "engine/test_engine_ends.py -k deadline"),
    Mutant("deadline-admission", "server/engine/admission.py", "if left_s < wait_s:", "if left_s < 0:", "engine/test_dispatcher.py"),
    Mutant("queue-limit", "server/engine/admission.py", "if num_left <= 0:", "if num_left <= -1000:", "engine/test_dispatcher.py"),
    Mutant("drain", "server/engine/dispatcher.py", "        if not self._inboxes:\n            self._emptied.set()", "        self._emptied.set()", "engine/test_dispatcher.py"),
    Mutant("fair-queueing", "server/engine/fair_queue.py", "self._virtual_finish[owner] = start + num_tokens", "self._virtual_finish[owner] = start", "engine/test_fair_queue.py"),
    Mutant("priority", "server/engine/fair_queue.py", "self.place - PLACES_PER_LEVEL", "self.place + PLACES_PER_LEVEL", "engine/test_fair_queue.py"),
    Mutant("draft-check", "server/engine/strategies.py", "place < len(draft) and draft[place] == token", "place < len(draft)", "engine/test_scheduler.py engine/test_batch_invariance.py"),
    Mutant("preempted-tokens", "server/engine/sequence.py", "            sequence.blocks, sequence.num_computed, sequence.num_cached_blocks = [], 0, 0", "            sequence.blocks, sequence.num_computed, sequence.num_cached_blocks = [], 0, 0\n            del sequence.token_ids[1:]", "engine/test_batch_invariance.py"),
    Mutant("cancel-blocks", "server/engine/scheduler.py", "            self._blocks.pool.release(sequence.blocks)\n        if not rest:", "            self._blocks.pool.release(sequence.blocks[:-1])\n        if not rest:", "engine/test_engine_ends.py engine/test_scheduler.py"),
    Mutant("pooling-range", "server/engine/strategies.py", "of = params.ranges[index] if params.ranges else range(len(text))", "of = range(len(text))", "engine/test_pooling.py"),
    Mutant("embedding-order", "server/engine/strategies.py", "EmbeddingEvent(self.request_id, sequence.index,", "EmbeddingEvent(self.request_id, sequence.index ^ 1,", "engine/test_pooling.py"),
    Mutant("quota-charge", "server/auth/caller.py", "self._bucket.level -= num_tokens - self._num_taken", "self._bucket.level -= 0", "auth/test_key_file.py -k tokens"),
    Mutant("key-revocation", "server/auth/key_file.py", "        if found.revoked:", "        if found.revoked and not found.name:", "auth/test_key_file.py"),
    Mutant("tls-reload", "server/auth/tls.py", "return None if pem is None else _configuration(pem)", "return None", "auth/test_tls.py -k new_certificate"),
    Mutant("watchdog-health", "server/loading/reloader.py", "self._on_health(\"hanging\", hangs)", "self._on_health(\"hanging\", False)", "end_to_end/test_reload.py -k hang"),
    Mutant("stop-string", "server/text/streaming.py", "max(map(len, strings)) - 1)", "max(map(len, strings)) - 2)", "text/test_streaming.py -k stop"),
    Mutant("utf8-split", "server/text/streaming.py", "return self._utf8.decode(self._bytes_of(token_id))", "return self._bytes_of(token_id).decode(\"utf-8\", \"replace\")", "text/test_streaming.py"),
    Mutant("tool-call-index", "server/text/streaming.py", "ToolCallDelta(self._num_calls, arguments=text)", "ToolCallDelta(0, arguments=text)", "text/test_streaming.py"),
    Mutant("grammar-cache-key", "server/request.py", "f\"{self.kind}\\0{self.text}\"", "f\"{self.text}\"", "grammar/test_compiler.py"),
    Mutant("usage", "server/frontend/answer.py", "usage = replace(event.usage, generated=self.num_tokens)", "usage = event.usage", "engine/test_dispatcher.py -k stop_string"),
    Mutant("retry-final", "server/client/retry.py", "return error.code is grpc.StatusCode.UNAVAILABLE and not error.is_lasting", "return True", "client/test_calls.py -k retr"),
    Mutant("retry-after", "server/http/errors.py", "(\"retry-after\", str(math.ceil(wait_s))), ", "", "http/test_completions.py -k batch_is_one_call"),
    Mutant("resume-duplicate", "server/client/retry.py", "self._tokens[number] += chunk.token_ids[old:]", "self._tokens[number] += chunk.token_ids", "client/test_resume.py"),
    Mutant("generated-tokens-metric", "server/telemetry/metrics.py", "            self.count(\"quill_generation_tokens\")\n", "            pass\n", "telemetry/test_metrics.py"),
)
# fmt: on


def copy_tree(root: Path, copy: Path) -> None:
    """All that git knows and the compiled operators; a link by which `quill` is the copy."""
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=root, check=True, capture_output=True, text=True
    ).stdout.split("\0")
    kernels = root / "export" / "operators" / "kernels"
    built = [str(path.relative_to(root)) for path in kernels.iterdir()]
    for name in {*filter(None, listed), *built}:
        if (root / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, copy / name)
    (copy / ".link").mkdir()
    (copy / ".link" / "quill").symlink_to(copy)


class Ended(NamedTuple):
    code: int
    failed: list[str]
    printed: str


def run_tests(tests: Sequence[str], copy: Path, python: str) -> Ended:
    paths = [
        each if each[0] == "-" or "/" not in each else f"tests/server/{each}" for each in tests
    ]
    ended = subprocess.run(
        [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *paths],
        cwd=copy,
        env={**os.environ, "PYTHONPATH": str(copy / ".link"), "OMP_NUM_THREADS": "1"},
        timeout=MAX_S,
        capture_output=True,
        text=True,
        check=False,
    )
    lines = ended.stdout.splitlines()
    failed = [line.split()[1] for line in lines if line.startswith(("FAILED tests", "ERROR tests"))]
    return Ended(ended.returncode, failed, ended.stdout[-500:] + ended.stderr[-500:])


def run(mutant: Mutant, copy: Path, python: str, broken: Sequence[str]) -> str:
    """ "caught", "survived", or what prevented the mutant. `broken` tests fail without it."""
    path = copy / mutant.path
    before = path.read_text(encoding="utf-8") if path.exists() else ""
    if before.count(mutant.old) != 1:
        return f"not applied: its text is {before.count(mutant.old)} times in {mutant.path}"
    path.write_text(before.replace(mutant.old, mutant.new), encoding="utf-8")
    try:
        ended = run_tests(["-x", *_deselect(broken), *mutant.tests.split()], copy, python)
    except subprocess.TimeoutExpired:
        return "caught (by the time limit)"
    finally:
        path.write_text(before, encoding="utf-8")
    if ended.code not in (0, 1):  # pytest's own: no such test, a usage error
        return f"not tested: {ended.printed}"
    return f"caught by {ended.failed[0]}" if ended.failed else "survived"


def _deselect(tests: Sequence[str]) -> list[str]:
    return [f"--deselect={each}" for each in tests]


def run_all(mutants: Sequence[Mutant], root: Path, python: str) -> int:
    """How many weren't caught."""
    outcomes: list[str] = []
    with tempfile.TemporaryDirectory(prefix="quill-mutants-") as folder:
        copy = Path(folder).resolve() / "copy"
        copy_tree(root, copy)
        files = {word for mutant in mutants for word in mutant.tests.split() if "/" in word}
        broken = run_tests(sorted(files), copy, python).failed
        for name in broken:
            print(f"left out, since it fails without any mutant: {name}", flush=True)
        for mutant in mutants:
            outcomes.append(run(mutant, copy, python, broken))
            print(f"{mutant.name:32} {outcomes[-1]}", flush=True)
    num_caught = sum(outcome.startswith("caught") for outcome in outcomes)
    print(f"{num_caught} of {len(mutants)} mutants were caught")
    return len(mutants) - num_caught


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants")
    parser.add_argument("--only", help="one mutant's name", choices=[m.name for m in MUTANTS])
    args = parser.parse_args()
    chosen = [mutant for mutant in MUTANTS if args.only in (None, mutant.name)]
    return 1 if run_all(chosen, ROOT, sys.executable) else 0


if __name__ == "__main__":
    sys.exit(main())
