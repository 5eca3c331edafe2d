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


@pytest.hookimpl(tryfirst=True)  # before xdist looks at groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """With several processes (`make test`), a room's tests share one: they share its bundles."""
    for item in items:
        room = item.path.relative_to(item.config.rootpath).parts[1]
        item.add_marker(pytest.mark.xdist_group(room))
