"""Who may import whom: the table of rooms in ARCHITECTURE.md, checked in the source itself."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ROOMS = ("model", "export", "server", "protos", "loadtest")
MAY_IMPORT = {
    "model": set(),
    "export": {"model"},
    "server": {
        *(
            "protos",
            "quill.export.bundle.manifest",
            "quill.export.bundle.graph_contract",
            "quill.export.errors",
        ),
        "quill.export.operators.library",
    },
    "protos": set(),
    # The engine without the network, for `quill bench engine`; and a client's way in.
    "loadtest": {
        *(
            "protos",
            "quill.server.loading.engine_factory",
            "quill.server.request",
            "quill.server.events",
            "quill.server.errors",
        ),
        *(
            "quill.export.operators.library",
            "quill.export.bundle.manifest",
            "quill.server.serve.default_model",
        ),
        *(
            "quill.server.client.access",
            "quill.server.cli.access_options",
            "quill.server.cli.argument_types",
            "quill.server.client.connection_errors",
        ),
    },
}
TORCH_FREE = ("server", "protos", "loadtest")
# They run in the peers' virtual environment, as processes of their own.
PEERS = ("peer_transformers.py", "peers_prepare.py")


def imported_modules(path: Path) -> set[str]:
    """Every module that a file imports, at the top or inside a function."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def source_files(room: str) -> list[Path]:
    return sorted((ROOT / room).glob("*.py"))


def room_of(module: str) -> str:
    return module.partition(".")[0]


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_only_the_rooms_it_may(room: str) -> None:
    allowed = MAY_IMPORT[room]
    for path in source_files(room):
        for module in imported_modules(path):
            if room_of(module) in ROOMS and room_of(module) != room:
                parts = module.split(".")
                prefixes = {".".join(parts[:end]) for end in range(1, len(parts) + 1)}
                assert prefixes & allowed, f"{path.relative_to(ROOT)} imports {module}"


@pytest.mark.parametrize("room", TORCH_FREE)
def test_a_serving_room_never_imports_torch(room: str) -> None:
    for path in source_files(room):
        if path.name in PEERS:
            continue
        assert "torch" not in {room_of(module) for module in imported_modules(path)}, path


def test_there_are_no_other_folders() -> None:
    known = {*ROOMS, "tests"}
    packages = {path.parent.name for path in ROOT.glob("*/*.py") if path.parent.name[0] != "."}
    assert packages - {"build"} <= known
    nested = [path for room in ROOMS for path in (ROOT / room).glob("*/*.py")]
    assert not nested


@pytest.mark.parametrize("path", [p for room in ROOMS for p in source_files(room)], ids=str)
def test_a_module_opens_by_saying_what_it_is(path: Path) -> None:
    if path.name.endswith(("_pb2.py", "_pb2_grpc.py")):
        return
    assert ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))), path
