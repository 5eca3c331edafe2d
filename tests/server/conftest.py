"""Fixtures that every test of the server may use."""

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.server.tiny_bundle import TinyBundle


@pytest.fixture(scope="session")
def tiny_bundle(tmp_path_factory: pytest.TempPathFactory) -> "TinyBundle":
    # Torch takes seconds to import, and most tests here do without.
    from tests.server.tiny_bundle import make_tiny_bundle

    return make_tiny_bundle(tmp_path_factory.mktemp("server") / "tiny")


@pytest.fixture(scope="session")
def tiny_for_both(tmp_path_factory: pytest.TempPathFactory) -> "TinyBundle":
    """With graphs for the CPU and for CUDA."""
    from tests.server.tiny_bundle import make_tiny_bundle

    return make_tiny_bundle(tmp_path_factory.mktemp("server") / "both", ("fp32", "fp16"))
