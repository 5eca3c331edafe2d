"""What tests of several rooms may ask for."""

import os
from typing import TYPE_CHECKING

import pytest

import quill as quill

if "QUILL_EMULATED" in os.environ:  # before anything that traces is imported
    from tests.native_tracer import install

    install()

if TYPE_CHECKING:
    from tests.server.tiny_bundle import TinyBundle


@pytest.fixture(scope="session")
def tiny_translator(tmp_path_factory: pytest.TempPathFactory) -> "TinyBundle":
    # Torch takes seconds to import, and most tests do without.
    from tests.server.tiny_bundle import make_tiny_translator

    return make_tiny_translator(tmp_path_factory.mktemp("translator") / "translator")


@pytest.fixture(scope="session")
def tiny_encoder(tmp_path_factory: pytest.TempPathFactory) -> "TinyBundle":
    from tests.server.tiny_bundle import make_tiny_encoder

    return make_tiny_encoder(tmp_path_factory.mktemp("encoder") / "encoder")
