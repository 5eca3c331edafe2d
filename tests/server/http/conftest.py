"""A server with an HTTP door, one for all tests of a module, and a client of it."""

from collections.abc import Iterator

import pytest

from tests.server.http_client import HttpClient
from tests.server.running import Running, running_server


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    with running_server(http_port=0) as server:
        yield server


@pytest.fixture
def client(running: Running) -> HttpClient:
    return HttpClient(running.http_port)
