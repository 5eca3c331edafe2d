"""What the pages tell people to open and to type exists: paths, links, commands, make's targets.

Sources are read too, for the paths and modules that their docstrings and comments name.
What a user makes (runs/, bundles/, *.key, answers.jsonl) begins with no package's name: it passes.
"""

import argparse
import ast
import functools
import importlib
import re
import shlex
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from quill.__main__ import build_parser

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("model", "export", "server", "protos", "loadtest")
NAMES = ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "SECURITY.md")
PAGES = [Path(name) for name in NAMES]
PAGES += [
    Path(package, "README.md") for package in PACKAGES if package != "protos"
]  # its file explains itself
PAGES += sorted(path.relative_to(ROOT) for path in ROOT.glob("*/docs/*.md"))
HISTORY = [Path("CHANGELOG.md"), Path("loadtest/RESULTS.md")]  # may name what is gone; links hold
MAX_README_LINES = 130
Finder = Callable[[str], list[str]]

PATH = re.compile(r"(?<![\w./~<-])(?:" + "|".join((*PACKAGES, "tests")) + r")/[\w*/.-]*[\w*/]")
FILE_NAME = re.compile(r"`([\w-]+\.(?:py|h|cpp|md|proto|yaml|toml|service))`")
FOLDER_NAME = re.compile(r"`(\w+)/`")
LINK = re.compile(r"\]\(([^)\s#]+)[^)]*\)")
MODULE = re.compile(r"-m ((?:quill|tests|" + "|".join(PACKAGES) + r")\.[\w.]*\w)")
EXTRA = re.compile(r"(?:quill|'\.)\[([a-z,]+)\]")
FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`([^`\n]+)`")
QUILL = re.compile(r"(?:^|/|-m )quill ([a-z].*)")


def sources() -> list[Path]:
    """All that people write here, relative to the root, but what protoc makes."""
    folders = [ROOT / name for name in (*PACKAGES, "tests")]
    found = [path for folder in folders for path in folder.rglob("*") if path.is_file()]
    found += [*ROOT.glob("*.py"), ROOT / "Makefile", ROOT / "Dockerfile", ROOT / "pyproject.toml"]
    kinds = {".py", ".h", ".cpp", ".proto", ".toml", ""}
    return sorted(
        path.relative_to(ROOT)
        for path in found
        if path.suffix in kinds and "_pb2" not in path.name and path != Path(__file__)
    )


def read(path: Path) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


def missing_paths(text: str) -> list[str]:
    """Paths that begin with a package's name, from the root; a star stands for anything."""
    return [name for name in PATH.findall(text) if not list(ROOT.glob(name.rstrip("/")))]


def missing_names(text: str) -> list[str]:
    """Names of files and folders that stand alone, and are nowhere in the tree."""
    folders = [ROOT / name for name in (*PACKAGES, "tests")]
    there = {path.name for folder in folders for path in folder.rglob("*")}
    there |= {path.name for path in ROOT.iterdir()}
    return [name for name in (*FILE_NAME.findall(text), *FOLDER_NAME.findall(text))
            if name not in there]  # fmt: skip


def missing_modules(text: str) -> list[str]:
    """What `python -m` is told to run, by a name that works from anywhere."""
    return [name for name in MODULE.findall(text) if not is_module(name)]


def is_module(name: str) -> bool:
    first, *rest = name.split(".")
    place = ROOT.joinpath(*([] if first == "quill" else [first]), *rest)
    return first in ("quill", "tests") and (place.with_suffix(".py").exists() or place.is_dir())


def missing_links(page: Path, text: str) -> list[str]:
    local = [name for name in LINK.findall(text) if "://" not in name]
    return [name for name in local if not (ROOT / page.parent / name).exists()]


def shell_lines(text: str) -> Iterator[str]:
    """Lines of the blocks that aren't Python, those that end in a backslash joined."""
    for language, block in FENCED.findall(text):
        if language != "python":
            yield from (line.removeprefix("$ ") for line in block.replace("\\\n", " ").splitlines())


def inline_code(text: str) -> list[str]:
    return [str(code) for code in INLINE.findall(FENCED.sub("", text))]


@functools.cache
def quill_command() -> argparse.ArgumentParser:
    return build_parser()


def words_of(line: str) -> list[str]:
    """As a shell takes them, up to where the output goes. In a sentence quotes may be open."""
    try:
        words = shlex.split(line, comments=True)
    except ValueError:
        words = line.split()
    return words[: words.index(">")] if ">" in words else words


def unknown_targets(text: str) -> list[str]:
    makefile = read(Path("Makefile")).replace("$(VENV)", ".venv").replace("$(PEERS)", ".venv-peers")
    targets = set(re.findall(r"^([\w./-]+):(?!=)", makefile, re.MULTILINE))
    lines = [line for line in (*shell_lines(text), *inline_code(text)) if line.startswith("make ")]
    wanted = [word for line in lines for word in words_of(line)[1:] if "=" not in word]
    return [word for word in wanted if word not in targets]


def unknown_commands(text: str) -> list[str]:
    """Lines with a `quill` that can't be typed so. Within a sentence arguments may be missing."""
    wrong = []
    for is_whole, lines in ((True, shell_lines(text)), (False, inline_code(text))):
        for line in lines:
            found = QUILL.search(line)
            problem = command_problem(found.group(1), is_whole) if found else None
            if problem is not None:
                wrong.append(f"{line}: {problem}")
    return wrong


def command_problem(command: str, is_whole: bool) -> str | None:
    words = words_of(command)
    parser, rest = quill_command(), words
    while (choices := subcommands(parser)) is not None and (rest or is_whole):
        if not rest or rest[0] not in choices:
            return f"{rest[:1]} is none of {sorted(choices)}"
        parser, rest = choices[rest[0]], rest[1:]
    options = [word.partition("=")[0] for word in rest if re.fullmatch(r"--[\w-]+(=.*)?", word)]
    unknown = [option for option in options if option not in parser._option_string_actions]
    if unknown:
        return f"there is no {', '.join(unknown)}"
    if is_whole and "…" not in words:
        try:
            quill_command().parse_args(words)
        except SystemExit:
            return "the arguments aren't understood"
    return None


def subcommands(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser] | None:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            return dict(action.choices)
    return None


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_what_a_page_names_is_there(page: Path) -> None:
    text = read(page)
    assert missing_paths(text) == []
    assert missing_names(text) == []
    assert missing_modules(text) == []


@pytest.mark.parametrize("page", [*PAGES, *HISTORY], ids=str)
def test_links_and_pictures_lead_somewhere(page: Path) -> None:
    assert missing_links(page, read(page)) == []


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_what_a_page_tells_to_type_can_be_typed(page: Path) -> None:
    text = read(page)
    assert unknown_targets(text) == []
    assert unknown_commands(text) == []
    extras = tomllib.loads(read(Path("pyproject.toml")))["project"]["optional-dependencies"]
    assert {name for found in EXTRA.findall(text) for name in found.split(",")} <= set(extras)


# In an environment of their own: make test-clients.
OTHER_CLIENTS = ("openai",)


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_python_of_a_page_imports_what_exists(page: Path) -> None:
    for language, block in FENCED.findall(read(page)):
        for node in ast.walk(ast.parse(block)) if language == "python" else ():
            if isinstance(node, ast.ImportFrom) and node.module not in OTHER_CLIENTS:
                module = importlib.import_module(str(node.module))
                assert [each.name for each in node.names if not hasattr(module, each.name)] == []


def test_what_sources_name_is_there() -> None:
    finders = (missing_paths, missing_modules, unknown_targets, unknown_commands)
    named = [(path, find(read(path))) for path in sources() for find in finders]
    assert [(path, missing) for path, missing in named if missing] == []


def test_the_readme_is_short() -> None:
    assert len(read(Path("README.md")).splitlines()) <= MAX_README_LINES


def test_the_tree_of_the_architecture_is_the_tree() -> None:
    text = read(Path("ARCHITECTURE.md"))
    (tree,) = (block for _, block in FENCED.findall(text) if block.startswith("model/ "))
    shown, package = set(), ""
    for indent, name in re.findall(r"^( *)(\w+)/ ", tree, re.MULTILINE):
        package = package if indent else name
        shown.add(f"{package}/{name}" if indent else name)
    there = {path.parent.relative_to(ROOT) for path in ROOT.glob("*/*/__init__.py")}
    packages = {path.as_posix() for path in there if path.parts[0] in PACKAGES}
    assert shown == packages | {*PACKAGES, "tests"}


@pytest.mark.parametrize(
    ("find", "good", "bad"),
    [
        (missing_paths, "`tests/test_*.py`, server/api/ and ~/server/x", "see server/nowhere.py"),
        (missing_names, "`conftest.py`, `api/`, `mine.json`", "`nowhere.py`"),
        (missing_names, "`kernels/`", "`nowhere/`"),
        (missing_modules, "python -m quill.protos.generate", "python -m quill.nowhere"),
        (missing_modules, "python -m tests.fuzz", "python -m server.commands"),
        (unknown_targets, "`make soak SOAK_MINUTES=1`", "`make haste`"),
        (unknown_targets, "```\nmake .venv/dev  # once\n```\n", "```\nmake check haste\n```\n"),
        (unknown_commands, "`quill serve --port`", "`quill serve --prot`"),
        (unknown_commands, "`quill bench`, `quill keys add`", "`quill bench nothing`"),
        (unknown_commands, "```\nx/quill keys list F > y\n```\n", "```\nquill keys list\n```\n"),
        (unknown_commands, "```\nquill serve B --port 0 # x\n```\n", "```\nquill fly\n```\n"),
    ],
)
def test_the_inspector_tells_good_from_bad(find: Finder, good: str, bad: str) -> None:
    assert find(good) == []
    assert len(find(bad)) == 1
