"""What every test of this room runs under."""

import pytest
import torch

from tests.server.tiny_bundle import TinyBundle, make_tiny_bundle

# The networks here are tiny; threads that wait for each other only make them slower.
torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny_bundle(tmp_path_factory: pytest.TempPathFactory) -> TinyBundle:
    return make_tiny_bundle(tmp_path_factory.mktemp("server") / "tiny")
