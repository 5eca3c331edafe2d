"""What several tests of this room share: a small bundle, and a server on it, once a run."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from quill.loadtest.environment.server import StartedServer, start_server


@pytest.fixture(scope="session")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Untrained and without a tokenizer: it speaks ids."""
    from tests.server.tiny_bundle import make_tiny_bundle

    return make_tiny_bundle(tmp_path_factory.mktemp("loadtest") / "tiny").directory


@pytest.fixture(scope="session")
def talking_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a tokenizer, a chat template and an end of text: its answers keep to forms."""
    from tests.server.tiny_bundle import make_talker

    return make_talker(tmp_path_factory.mktemp("talker") / "bundle").directory


@pytest.fixture(scope="session")
def talker(
    talking_bundle: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[StartedServer]:
    log = tmp_path_factory.mktemp("server") / "talker.log"
    with start_server(log, talking_bundle, "--threads", "1", "--max-num-seqs", "4") as running:
        yield running


@pytest.fixture(scope="session")
def server(bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[StartedServer]:
    log = tmp_path_factory.mktemp("server") / "server.log"
    options = ("--precision", "fp32", "--threads", "1", "--max-num-seqs", "4")
    with start_server(log, bundle, *options) as running:
        yield running
