"""`quill batch`, and `answer_lines` for pipelines: many lines at once, their answers in order.

Knows: lines, order, the terminal. Does not know: gRPC, HTTP, what lines say.
"""

import argparse
import asyncio
import itertools
import json
import logging
import sys
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from quill.server.client.access import Access, read_access
from quill.server.client.errors import CallError
from quill.server.client.tools.batch_lines import (
    ERROR,
    Answer,
    Json,
    derived_seed,
    line_digest,
    read_http_request,
    read_object,
    read_request,
    write_answer,
    write_error,
    write_reply,
)
from quill.server.client.tools.batch_output import Output, Progress
from quill.server.client.tools.batch_servers import BatchServers
from quill.server.errors import InvalidFieldError, ServerError

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")
_IDS = ("id", "custom_id")
# How many times the concurrency may have been started, or be done, behind the oldest item.
AHEAD = 8


class FailedLinesError(ServerError):
    """All lines are answered, some of them with an error."""

    exit_code = 4


@dataclass(frozen=True)
class Line:
    """`seed`: used if the line has none. `head`: the first fields of its answer."""

    text: bytes
    seed: int
    head: Json

    def written_head(self) -> bytes:
        return json.dumps(self.head).encode().removesuffix(b"}")


def batch(args: argparse.Namespace) -> None:
    logging.basicConfig(format=("\r\x1b[2K" if sys.stderr.isatty() else "") + "%(message)s")
    if args.output.exists() and args.input.exists() and args.output.samefile(args.input):
        raise ServerError(f"{args.output} is the input file. Give another for the answers")
    if args.input.exists() and not args.input.is_file():
        raise ServerError(f"{args.input} must be a file: it is read again when the batch resumes")
    num_lines = sum(1 for _ in _texts(args.input))
    with Output(args.output) as output:
        num_failed = asyncio.run(_run(args, output, num_lines))
    if num_failed:
        raise FailedLinesError(
            f'{num_failed} of {num_lines} lines failed: see their "error" in {args.output}'
        )


def answer_lines(
    lines: Sequence[str],
    address: str,
    *,
    http_addresses: Sequence[str] = (),
    access: Access | None = None,
    concurrency: int = 32,
    seed: int = 0,
) -> list[str]:
    """The answers to some lines of a batch, for pipelines that split files themselves.

    A line that has no seed gets one by its text: where equal lines should have different answers,
    give them seeds.
    """
    answers: list[str] = []

    async def main() -> None:
        requests = (
            Line(each.encode("utf-8", "surrogatepass"), derived_seed(seed, each), {})
            for each in lines
        )
        async with BatchServers(
            address, http_addresses, access or Access(), concurrency
        ) as servers:
            await in_order(
                requests,
                lambda line: answer(line, servers),
                lambda done: answers.append(done.line.decode().removesuffix("\n")),
                concurrency,
            )

    asyncio.run(main())
    return answers


def _texts(path: Path) -> Iterator[tuple[int, bytes]]:
    """Lines that aren't blank, with their numbers."""
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield number, line
    except OSError as error:
        raise ServerError(f"can't read {path}: {error.strerror}") from error


async def _run(args: argparse.Namespace, output: Output, num_lines: int) -> int:
    """How many lines failed, in this run or before."""
    async with BatchServers(
        args.address,
        args.http or (),
        read_access(args),
        args.concurrency,
        unavailable_timeout_s=args.unavailable_timeout,
        timeout_s=args.timeout,
    ) as servers:
        model = await servers.model()

        def lines() -> Iterator[Line]:
            for number, text in _texts(args.input):
                # The digest is of everything that the answer depends upon.
                head = {"line": number, "digest": line_digest(text, str(args.seed), model)}
                yield Line(text, derived_seed(args.seed, number), head)

        num_before, num_failed = output.resume((line.written_head() for line in lines()), ERROR)
        progress = Progress(num_lines, num_before)
        if num_before:
            progress.print(f"{num_before} lines are answered already")

        def take(done: Answer) -> None:
            output.append(done.line)
            progress.add(done.num_tokens, done.is_error)

        try:
            rest = itertools.islice(lines(), num_before, None)
            await in_order(rest, lambda line: answer(line, servers), take, args.concurrency)
        except BaseException:  # whatever it was, the answers that were written stay
            progress.end()
            progress.print(f"{progress.num_done} lines are answered: the same command resumes")
            raise
        finally:
            output.sync()
    progress.end()
    return num_failed + progress.num_failed


async def answer(line: Line, servers: BatchServers) -> Answer:
    """A line that can't be answered is answered with an error."""
    tail: Json = {}
    try:
        found = read_object(line.text)
        tail = {name: found[name] for name in _IDS if found.get(name) is not None}
        if "url" in found:
            status, body = await servers.post(*read_http_request(found, line.seed))
            name = line_digest(line.text, str(line.seed))
            return write_reply(line.head, status, body, name, tail)
        response = await servers.call(read_request(found, line.seed))
        return write_answer(line.head, response, tail)
    except (InvalidFieldError, CallError) as error:
        return write_error(line.head, error, tail)


async def in_order(
    items: Iterable[_Item],
    do: Callable[[_Item], Awaitable[_Result]],
    take: Callable[[_Result], None],
    concurrency: int,
) -> None:
    """`take` gets each result as soon as it has those before it. The first error ends it; results
    that are ready before that item are taken, also when it is canceled."""
    semaphore = asyncio.Semaphore(concurrency)
    waiting: deque[asyncio.Task[_Result]] = deque()

    async def work(item: _Item) -> _Result:
        async with semaphore:
            return await do(item)

    def take_ready() -> None:
        while waiting and waiting[0].done():
            take(waiting.popleft().result())

    try:
        for item in items:
            waiting.append(asyncio.create_task(work(item)))
            while len(waiting) >= AHEAD * concurrency:
                await asyncio.wait({waiting[0]})
                take_ready()
        while waiting:
            await asyncio.wait({waiting[0]})
            take_ready()
    except asyncio.CancelledError:
        while waiting and _has_result(waiting[0]):
            take(waiting.popleft().result())
        raise
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)


def _has_result(task: asyncio.Task[_Result]) -> bool:
    return task.done() and not task.cancelled() and task.exception() is None
