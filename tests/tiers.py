"""Which tests are fast, by a rule that needs no list: `pytest --fast` runs these alone.

A test file is fast unless its imports, and its conftests', followed through tests and product,
reach what trains and exports (torch), what starts servers, or other processes. A test in a fast
file is slow if it is marked so, or if it uses a session's fixture: these are expensive to make.

Knows: import statements. Does not know: what a test does, how long it takes.
"""

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
TESTS = ROOT / "tests"
SLOW = ("torch", "transformers", "matplotlib")
SLOW_IN_TESTS = (
    *("subprocess", "multiprocessing", "playwright", "ray", "tests.server.tiny_bundle"),
    *("tests.server.running.running_server", "tests.server.running.Running"),
)


def is_slow(test_file: Path) -> bool:
    """Whether the imports of a test file, or of its conftests, reach anything slow."""
    seen: set[Path] = set()
    conftests = [folder / "conftest.py" for folder in test_file.parents if TESTS in folder.parents]
    waiting = [test_file, *(path for path in conftests if path.is_file())]
    while waiting:
        path = waiting.pop()
        if path in seen:
            continue
        seen.add(path)
        names = _imports(path)
        in_product = path.is_relative_to(ROOT) and not path.is_relative_to(TESTS)
        slow = SLOW if in_product else (*SLOW, *SLOW_IN_TESTS)
        if any(name == each or name.startswith(f"{each}.") for name in names for each in slow):
            return True
        waiting += [source for source in map(_source, names) if source is not None]
    return False


@functools.cache
def _imports(path: Path) -> tuple[str, ...]:
    """All names that importing a file imports; of a test file, those within its functions, too."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    is_test = path.name.startswith("test_")
    return tuple(_names(ast.walk(tree) if is_test else iter(tree.body)))


def _names(nodes: Iterator[ast.AST]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@functools.cache
def _source(name: str) -> Path | None:
    """The file of ours that a name is in."""
    first, _, rest = name.partition(".")
    if first not in ("quill", "tests"):
        return None
    path = (TESTS if first == "tests" else ROOT).joinpath(*rest.split("."))
    for each in (path, path.parent):
        if each.with_suffix(".py").is_file():
            return each.with_suffix(".py")
    return None
