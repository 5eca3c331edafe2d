"""What systemd receives of a service: the watchdog is missed by one that isn't well."""

import asyncio
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from quill.server.machine.systemd import keep_notified, notify


@pytest.fixture
def systemd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as received:
        received.bind(str(tmp_path / "notify"))
        received.setblocking(False)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        yield received


def states(received: socket.socket) -> list[bytes]:
    found = []
    while True:
        try:
            found.append(received.recv(99))
        except BlockingIOError:
            return found


def test_service_that_is_not_well_misses_its_watchdog(
    systemd: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WATCHDOG_USEC", "3000")
    answers = iter([True, True, False, False, False])

    async def run() -> None:
        ready = asyncio.Event()
        ready.set()
        await keep_notified(ready, lambda: next(answers))

    with pytest.raises(RuntimeError, match="StopIteration"):
        asyncio.run(run())
    assert states(systemd) == [b"READY=1", b"WATCHDOG=1", b"WATCHDOG=1"]


def test_name_outside_of_the_file_system(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as received:
        received.bind("")  # Linux chooses one
        monkeypatch.setenv("NOTIFY_SOCKET", "@" + received.getsockname()[1:].decode())
        received.setblocking(False)
        notify("READY=1")
        assert states(received) == [b"READY=1"]


def test_without_systemd_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    notify("READY=1")
