"""`quill batch`: a file of questions becomes a file of answers.

Knows: files, the terminal. Does not know: gRPC, what lines say.
"""

import argparse
import asyncio
import itertools
import logging
import sys
from collections.abc import Iterator
from pathlib import Path

from quill.server.client.access import read_access
from quill.server.client.batch.answer import ERROR, Answer
from quill.server.client.batch.answering import Line, answer, numbered
from quill.server.client.batch.in_order import in_order
from quill.server.client.batch.output import Output
from quill.server.client.batch.progress import Progress
from quill.server.client.batch.servers import Asking, Servers
from quill.server.errors import ServerError


class FailedLinesError(ServerError):
    """All lines are answered, some of them with an error."""

    exit_code = 4


def batch(args: argparse.Namespace) -> None:
    logging.basicConfig(format=("\r\x1b[2K" if sys.stderr.isatty() else "") + "%(message)s")
    if args.output.exists() and args.input.exists() and args.output.samefile(args.input):
        raise ServerError(f"{args.output} is the file of questions. Give another for the answers")
    if args.input.exists() and not args.input.is_file():
        raise ServerError(f"{args.input} must be a file: it is read again when the command goes on")
    num_all = sum(1 for _ in _texts(args.input))
    with Output(args.output) as output:
        num_failed = asyncio.run(_run(args, output, num_all))
    if num_failed:
        raise FailedLinesError(
            f'{num_failed} of {num_all} lines failed: see their "error" in {args.output}'
        )


def _texts(path: Path) -> Iterator[tuple[int, bytes]]:
    """Lines that say something, with their numbers."""
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield number, line
    except OSError as error:
        raise ServerError(f"can't read {path}: {error.strerror}") from error


async def _run(args: argparse.Namespace, output: Output, num_all: int) -> int:
    """How many lines failed, in this run or before."""
    asking = Asking(
        addresses=args.address or [args.default_address],
        http_addresses=args.http or (),
        access=read_access(args),
        concurrency=args.concurrency,
        patience_s=args.unavailable_timeout,
        timeout_s=args.timeout,
    )
    async with Servers(asking) as servers:
        model = await servers.model()

        def lines() -> Iterator[Line]:
            return (numbered(text, number, args.seed, model) for number, text in _texts(args.input))

        heads = (line.written_head() for line in lines())
        num_before, num_failed = output.go_on(heads, ERROR)
        progress = Progress(num_all, num_before)
        if num_before:
            progress.say(f"{num_before} lines are answered already")

        def take(done: Answer) -> None:
            output.append(done.line)
            progress.note(done.num_tokens, done.is_error)

        try:
            rest = itertools.islice(lines(), num_before, None)
            await in_order(rest, lambda line: answer(line, servers), take, args.concurrency)
        except BaseException:  # whatever it was, what is answered stays
            progress.end()
            progress.say(f"{progress.num_done} lines are answered: the same command goes on")
            raise
        finally:
            output.sync()
    progress.end()
    return num_failed + progress.num_failed
