"""What tests of several packages use, and `--fast`: see tests/tiers.py."""

import os
import random
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import hypothesis
import pytest

import quill as quill
from tests.tiers import is_slow

if "QUILL_EMULATED" in os.environ:  # before anything that traces is imported
    from tests.native_tracer import install

    install()

# How long an example takes depends on who else is running, and each run has the same examples:
# `make fuzz` looks for others.
hypothesis.settings.register_profile(
    "quill",
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("quill")

if TYPE_CHECKING:
    from tests.server.tiny_bundle import TinyBundle


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """A test's random numbers don't depend on which tests this worker ran before."""
    random.seed(0)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fast", action="store_true", help="only tests that start and train nothing")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    is_test = collection_path.name.startswith("test_") and collection_path.suffix == ".py"
    return True if is_test and config.getoption("--fast") and is_slow(collection_path) else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--fast"):
        return
    slow = [item for item in items if _is_slow_item(item)]
    config.hook.pytest_deselected(items=slow)
    items[:] = [item for item in items if item not in set(slow)]


def _is_slow_item(item: pytest.Item) -> bool:
    if not isinstance(item, pytest.Function) or item.get_closest_marker("slow") is not None:
        return True
    found = item._fixtureinfo.name2fixturedefs.values()
    # Pytest's own fixtures have no folder.
    return any(each[-1].scope == "session" and each[-1].baseid for each in found)


@pytest.fixture(scope="session")
def tiny_translator(tmp_path_factory: pytest.TempPathFactory) -> "TinyBundle":
    # Torch takes seconds to import, and most tests do without.
    from tests.server.tiny_bundle import make_tiny_translator

    return make_tiny_translator(tmp_path_factory.mktemp("translator") / "translator")


@pytest.fixture(scope="session")
def tiny_encoder(tmp_path_factory: pytest.TempPathFactory) -> "TinyBundle":
    from tests.server.tiny_bundle import make_tiny_encoder

    return make_tiny_encoder(tmp_path_factory.mktemp("encoder") / "encoder")
