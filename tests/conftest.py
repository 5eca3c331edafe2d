"""What tests of several rooms may ask for."""

import os
from typing import TYPE_CHECKING

import pytest

import quill as quill

if TYPE_CHECKING:
    from tests.server.tiny_bundle import TinyBundle


@pytest.fixture(scope="session")
def tiny_translator(tmp_path_factory: pytest.TempPathFactory) -> "TinyBundle":
    # Torch takes seconds to import, and most tests do without.
    from tests.server.tiny_bundle import make_tiny_translator

    return make_tiny_translator(tmp_path_factory.mktemp("translator") / "translator")


def pytest_configure() -> None:
    if "QUILL_EMULATED" in os.environ:
        from tests.native_tracer import install

        install()
