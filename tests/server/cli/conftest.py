"""Commands against the module's `running` server."""

from collections.abc import Callable

import pytest

from quill.__main__ import main
from tests.server.running import Running

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(running: Running, capsys: pytest.CaptureFixture[str]) -> Run:
    """Exit code, stdout, stderr."""

    def call(command: str, *arguments: str) -> tuple[int, str, str]:
        code = main([command, "--address", running.address, "--timeout", "30", *arguments])
        return code, *capsys.readouterr()

    return call
