"""A server as processes of its own for the tests of a module, with faults that they switch on."""

from collections.abc import Iterator

import pytest

from tests.server.faults import Faults
from tests.server.process import ServerProcess, server_process
from tests.server.tiny_bundle import TinyBundle, make_talker


@pytest.fixture(scope="package")
def talker(tmp_path_factory: pytest.TempPathFactory) -> TinyBundle:
    return make_talker(tmp_path_factory.mktemp("talker"))


@pytest.fixture(scope="module")
def faults(tmp_path_factory: pytest.TempPathFactory) -> Faults:
    return Faults(tmp_path_factory.mktemp("faults"))


@pytest.fixture(scope="module")
def server(
    request: pytest.FixtureRequest,
    faults: Faults,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[ServerProcess]:
    """Of the module's SERVED, with its SERVER_OPTIONS."""
    bundle: TinyBundle = request.getfixturevalue(getattr(request.module, "SERVED", "tiny_bundle"))
    options: tuple[str, ...] = getattr(request.module, "SERVER_OPTIONS", ())
    log = tmp_path_factory.mktemp("log") / "log"
    with server_process(bundle.directory, log, *options, environment=faults.environment) as running:
        yield running
