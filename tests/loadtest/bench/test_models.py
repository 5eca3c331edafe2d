"""Where the peers' programs and models are."""

from importlib.util import find_spec
from pathlib import Path

from quill.loadtest.bench.models import peer_commands


def test_every_peers_command_names_a_module_that_is_there(tmp_path: Path) -> None:
    (tmp_path / "x-SmolLM2-135M-x.gguf").touch()
    commands = peer_commands(tmp_path, 2)
    assert len(commands) == 9
    for _, option, module, _, _, threads in commands:
        assert option == "-m"
        assert find_spec(module) is not None
        assert threads == "2"
