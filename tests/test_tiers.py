"""`make test-fast` leaves out what trains, exports or starts servers, by its imports alone."""

from pathlib import Path

import pytest

from tests.tiers import TESTS, is_slow

SLOW_LINES = (
    "import torch",
    "import subprocess",
    "from tests.server.running import make_served, running_server",
    "from tests.server.process import server_process",
    "from quill.model.training.trainer import Trainer",
    "def test() -> None:\n    from tests.server.tiny_bundle import make_talker",
)


@pytest.mark.parametrize("line", SLOW_LINES)
def test_file_that_imports_what_is_slow_is_slow(line: str, tmp_path: Path) -> None:
    path = tmp_path / "test_made.py"
    path.write_text(line)
    assert is_slow(path)


@pytest.mark.parametrize("name", ["engine/test_engine.py", "grammar/test_compiler.py"])
def test_engine_with_a_fake_model_and_grammars_are_fast(name: str) -> None:
    assert not is_slow(TESTS / "server" / name)


def test_end_to_end_is_slow() -> None:
    paths = [*TESTS.rglob("end_to_end/test_*.py")]
    assert len(paths) > 20
    assert all(map(is_slow, paths))
