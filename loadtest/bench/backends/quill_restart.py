"""`quill serve` that is started again and again with one --prefix-cache-dir.

    python -m quill.loadtest.bench.backends.quill_restart '{"bundle": …, "options": […]}'

Knows: how a server is started, gRPC, the clock, the system's page cache. Does not know: bars.
"""

import itertools
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from quill.loadtest.bench.backends.protocol import BackendInfo
from quill.loadtest.bench.backends.quill_server import QuillServer, ServerConfig, main, request
from quill.loadtest.bench.backends.quill_streams import (
    WARM_STEPS,
    Client,
    Streams,
    read_prompt,
    run_client,
)

NUM_STEPS = 128


class QuillRestart:
    def __init__(self, config: ServerConfig, stack: ExitStack) -> None:
        self._directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        options = (*config.options, "--prefix-cache-dir", str(self._directory / "cache"))
        self._config = replace(config, options=options)
        self.info = BackendInfo("Quill", "", "", 0)

    def answer(
        self,
        prompts: Sequence[Sequence[int]],
        num_new: int,
        is_empty: bool = False,
        drops_pages: bool = False,
    ) -> dict[str, Any]:
        """One prompt after another on a new server. `is_empty`: the directory, at first;
        `drops_pages`: the system has none of its files in memory."""
        if is_empty:
            shutil.rmtree(self._directory / "cache", ignore_errors=True)
        if drops_pages:
            for path in self._files():
                drop(path)
        began_s = time.perf_counter()
        with self._server() as server:
            start_s = time.perf_counter() - began_s

            async def measure(client: Client) -> tuple[list[float], list[list[int]]]:
                await read_prompt(client, prompts[0][:1])  # connects
                first_tokens_s, answers = [], []
                for ids in prompts:
                    sent_s = time.perf_counter()
                    answer = (await client.send(request(ids, num_new, 0.0))).check()
                    first_tokens_s.append(answer.times_s[0] - sent_s)
                    answers.append(answer.token_ids)
                return first_tokens_s, answers

            first_tokens_s, answers = run_client(server.address, measure)
        size = sum(path.stat().st_size for path in self._files())
        return {
            "first_tokens_s": first_tokens_s,
            "answers": answers,
            "start_s": start_s,
            "directory_bytes": size,
        }

    def beside(
        self, ids: Sequence[int], prompts: Sequence[Sequence[int]], num_streams: int
    ) -> dict[str, Any]:
        """Gaps of streams on a new server: alone, and while it reads prompts from the disk."""

        async def measure(client: Client) -> dict[str, list[float]]:
            async with Streams(client, ids, num_streams) as streams:
                await streams.wait_for_steps(WARM_STEPS)
                times_s = [time.perf_counter()]
                await streams.wait_for_steps(NUM_STEPS)
                times_s.append(time.perf_counter())
                for each in prompts:
                    await read_prompt(client, each)
                times_s.append(time.perf_counter())
                spans = zip(("alone", "beside"), itertools.pairwise(times_s), strict=True)
                return {name: quantiles(streams.gaps(*span)) for name, span in spans}

        with self._server() as server:
            return run_client(server.address, measure)

    @contextmanager
    def _server(self) -> Iterator[QuillServer]:
        with ExitStack() as stack:
            yield QuillServer(self._config, stack)

    def _files(self) -> list[Path]:
        return [path for path in (self._directory / "cache").rglob("*") if path.is_file()]

    def memory(self) -> int:
        return 0


def quantiles(values: Sequence[float]) -> list[float]:
    """The median, the 95th and the 99th percentile, the largest."""
    return [float(each) for each in np.percentile(values, (50, 95, 99, 100))]


def drop(path: Path) -> None:
    """The system forgets a file's pages: it is read from the disk."""
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(file)


if __name__ == "__main__":
    main(QuillRestart)
