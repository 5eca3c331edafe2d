"""Which engines' processes run: one ends when nobody uses it any more, and no sooner."""

import asyncio
import os
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from quill.server.errors import StartError
from quill.server.process import engine_process
from quill.server.process.engine_process import EngineProcess
from quill.server.process.engines import Engines
from quill.server.settings import Settings
from tests.server import fake_engine
from tests.server.process import children_of

Run = Callable[[Callable[[Engines], Coroutine[Any, Any, None]]], None]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs a test with engines of processes that load nothing."""
    monkeypatch.setattr(engine_process, "MODULE", fake_engine.__name__)

    async def with_engines(test: Callable[[Engines], Coroutine[Any, Any, None]]) -> None:
        engines = Engines(tmp_path, Settings())
        try:
            await test(engines)
        finally:
            await engines.close()

    return lambda test: asyncio.run(with_engines(test))


async def runs(process: EngineProcess) -> bool:
    """Whether it wasn't told to end, by what was released so far."""
    await asyncio.sleep(0)
    try:
        process.connect().close()
    except OSError:
        return False
    return True


def test_an_engine_runs_until_the_last_lease_of_a_frontend_is_released(run: Run) -> None:
    async def test(engines: Engines) -> None:
        number, process = await engines.newest_after(0, "a")
        assert await engines.newest_after(0, "a") == (number, process)
        await engines.newest_after(number, "a")
        engines.release(number, "a")
        assert await runs(process), "the other lease's streams are on it"
        engines.release(number, "a")
        assert not await runs(process)

    run(test)


def test_the_engines_of_a_frontend_that_died_end_but_for_the_newest(run: Run) -> None:
    async def test(engines: Engines) -> None:
        number, old = await engines.newest_after(0, "a")
        await engines.newest_after(0, "a")
        _, new = await engines.newest_after(number, "a")
        engines.forget("a")
        engines.release(number, "a")  # of a load that ended after the frontend's death
        assert (await runs(old), await runs(new)) == (False, True)

    run(test)


def test_an_engine_that_the_frontend_refuses_ends_and_the_one_before_it_stays(run: Run) -> None:
    async def test(engines: Engines) -> None:
        number, good = await engines.newest_after(0, "a")
        refused_number, refused = await engines.newest_after(number, "a")
        engines.release(refused_number, "a")
        assert (await runs(good), await runs(refused)) == (True, False)
        engines.forget("a")
        assert await engines.newest_after(0, "b") == (number, good), "which is loaded"
        next_number, _ = await engines.newest_after(refused_number, "b")
        assert next_number > refused_number

    run(test)


def test_an_engine_that_nobody_uses_ends_when_there_is_a_newer_one(run: Run) -> None:
    async def test(engines: Engines) -> None:
        number, old = await engines.newest_after(0, "a")
        engines.release(number, "a")
        assert await runs(old), "for the next frontend"
        await engines.newest_after(number, "a")
        assert not await runs(old)

    run(test)


def test_an_engine_that_loads_when_the_server_stops_is_told_to_end(
    run: Run, tmp_path: Path
) -> None:
    (tmp_path / "loading").touch()

    async def test(engines: Engines) -> None:
        loading = asyncio.ensure_future(engines.newest_after(0, "a"))
        waiting = asyncio.ensure_future(engines.newest_after(0, "b"))
        await asyncio.sleep(0)
        await engines.close()
        with pytest.raises(StartError, match="ended while it loaded"):
            await loading
        with pytest.raises(StartError, match="stopping"):
            await waiting

    run(test)


def test_a_bundle_that_cannot_be_served_leaves_no_process_and_the_engine_before_it(
    run: Run, tmp_path: Path
) -> None:
    async def test(engines: Engines) -> None:
        number, good = await engines.newest_after(0, "a")
        children = set(children_of(os.getpid()))
        (tmp_path / "damaged").touch()
        with pytest.raises(StartError, match="damaged"):
            await engines.newest_after(number, "a")
        assert set(children_of(os.getpid())) == children, "nor a zombie"
        assert await engines.newest_after(0, "b") == (number, good)

    run(test)


def test_signals_of_a_terminal_do_not_reach_an_engine(run: Run) -> None:
    async def test(engines: Engines) -> None:
        _, process = await engines.newest_after(0, "a")
        assert os.getsid(process.ready.pid) == process.ready.pid

    run(test)
