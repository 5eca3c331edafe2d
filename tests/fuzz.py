"""`make fuzz`: many bad inputs at a real server, and at the readers of bundles and checkpoints.

Knows: how many inputs of each kind are sent. Does not know: what is bad about an input.
Ends with a message and code 1 at the first crash, hang, INTERNAL, other answer or leak. Every input
has a number: `--seed S --first N --inputs 1` makes one of them again.
"""

import argparse
import asyncio
import json
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from tests.good_files import write_good_files
from tests.server.adversarial_load import Adversary, ServerFaultError
from tests.server.process import ROOT, ServerProcess, server_process, wait_until

AT_ONCE = 64
SHARE_OF_BYTES = 0.3
SHARE_OF_HTTP = 0.3
SHARE_OF_FILES = 0.1
FILES_AT_ONCE = 5000
SHOW_S = 5.0
Outcomes = Counter[tuple[str, str]]  # by kind of input, and answer
# grpc's own messages about headers that are no text have a traceback too: it isn't of our code.
BUG = re.compile(r"a bug in |broke down|ASGI application|File \".*/server/\w+\.py\"")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--inputs", type=int, default=100_000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=float("inf"), help="at the port, at most")
    args = parser.parse_args()
    num_files = round(args.inputs * SHARE_OF_FILES)
    started_s = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        write_good_files(directory)
        numbers = range(args.first, args.first + args.inputs - num_files)
        outcomes = fuzz_server(directory, args.seed, numbers, args.minutes)
        files = fuzz_files(directory, args.seed, args.first, num_files)
    minutes = (time.monotonic() - started_s) / 60
    num_tried = outcomes.total() + files.total()
    print(f"{num_tried:,} bad inputs in {minutes:.1f} minutes (seed {args.seed})")
    print("at the server's port:", *_lines(outcomes), sep="\n  ")
    print("at the readers of files:", *_lines(files), sep="\n  ")
    print("no crash, no hang, no INTERNAL, no other answer, no sequence or descriptor kept")


def fuzz_server(directory: Path, seed: int, numbers: range, minutes: float) -> Outcomes:
    log = directory / "server.log"
    with server_process(directory / "bundle", log, "--max-num-seqs", "8") as server:
        outcomes = asyncio.run(_attack(server, seed, numbers, time.monotonic() + 60 * minutes))
        wait_until(server.is_idle, "the server has nothing to do")
        found = BUG.search(server.log)
        if found:
            raise ServerFaultError(
                f"the log has {found[0]!r}: {server.log[found.start() :][:2000]}"
            )
    return outcomes


async def _attack(server: ServerProcess, seed: int, numbers: range, end_s: float) -> Outcomes:
    adversary = Adversary(server.address, server.http_port)
    known = await adversary.known_answer()
    num_fds, shown_s = server.num_fds, 0.0
    for start in range(0, len(numbers), AT_ONCE):
        some = numbers[start : start + AT_ONCE]
        num_http = round(len(some) * SHARE_OF_HTTP)
        await adversary.attack_http(seed, some[:num_http])
        await adversary.attack(seed, some[num_http:], SHARE_OF_BYTES)
        answer = await adversary.known_answer()
        if answer != known:
            raise ServerFaultError(f"after input {some[-1]} the answer is {answer}, not {known}")
        if time.monotonic() - shown_s > SHOW_S:
            shown_s = time.monotonic()
            _show(f"{start + len(some):,} of {len(numbers):,} at the port")
        if time.monotonic() > end_s:
            break
    wait_until(lambda: server.num_fds <= num_fds + AT_ONCE, "connections are given back")
    await adversary.close()
    return adversary.outcomes


def fuzz_files(directory: Path, seed: int, first: int, number: int) -> Outcomes:
    """In processes of their own, which may be killed by what they read."""
    outcomes: Outcomes = Counter()
    for start in range(first, first + number, FILES_AT_ONCE):
        inputs = min(FILES_AT_ONCE, first + number - start)
        outcomes += read_bad_files(directory, seed, start, inputs)
        _show(f"{start + inputs - first:,} of {number:,} files")
    return outcomes


def read_bad_files(directory: Path, seed: int, first: int, number: int) -> Outcomes:
    options = ("--seed", str(seed), "--first", str(first), "--inputs", str(number))
    command = [sys.executable, "-m", "tests.bad_files", str(directory), *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    *_, last = ["nothing was read", *done.stdout.splitlines()]
    if done.returncode:
        raise ServerFaultError(f"code {done.returncode} at {last}: {done.stderr[-2000:]}")
    return Counter({(kind, answer): count for kind, answer, count in json.loads(last)})


def _lines(outcomes: Outcomes) -> list[str]:
    """One for each kind of input: how many there were, and what was answered."""
    lines = []
    for kind in sorted({kind for kind, _ in outcomes}):
        answers = Counter({name: num for (each, name), num in outcomes.items() if each == kind})
        listed = ", ".join(f"{num:,} {name}" for name, num in answers.most_common())
        lines.append(f"{kind}, {answers.total():,}: {listed}")
    return lines or ["none"]


def _show(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    try:
        main()
    except (ServerFaultError, AssertionError) as error:
        sys.exit(f"fuzz: {error}")
