"""Who may import whom: the packages, and the folders within them, checked in the source itself."""

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

import pytest

from quill.cache import code_of
from quill.export.version import NOT_EXPORTER
from quill.model.importers.import_weights import NOT_IMPORTER

ROOT = Path(__file__).parent.parent
PACKAGES = ("model", "export", "server", "protos", "loadtest")
MAX_MODULES = 15  # in one folder: more can't be seen at a glance

# What a package may import of the others. A line for a folder stands in place of its package's.
BETWEEN = {
    "model": "cache json_records command_table tokenizer_growth",
    # Benchmarks run on servers, too.
    "model/benchmarks": "json_records protos server.client server.addresses "
    "server.text.chat_template",
    "export": "model cache json_records command_table",
    "server": "protos cache tokenizer_growth export.bundle export.errors export.precisions "
    "export.operators.library model.sources.kinds model.sources.catalogue",
    "server/client": "protos",
    "protos": "",
    "loadtest": "protos server.fields server.client server.balancing_headers "
    "server.cli.arguments server.prometheus_text server.addresses export.bundle",
    # The engine without the network, for `quill bench engine`.
    "loadtest/bench": "protos cache command_table server.client server.cli.arguments export.bundle "
    "server.prometheus_text server.addresses "
    "server.loading.engine_factory server.loading.choices server.request "
    "server.engine.engine server.engine.model_runner "
    "server.outputs server.errors server.serve.prepare export.operators.library "
    "export.precisions export.verify.token_scores model.sources.kinds model.sources.catalogue",
}

# What a folder may import of its own package beside the values at its root, from the lowest folder
# to the highest. A name without a folder is a module at the root that isn't a value.
WITHIN = {
    "server": {
        "machine": "",
        "text": "",
        "auth": "",
        "grammar": "machine",
        "sampling": "machine",
        "engine": "sampling machine",
        "disk_cache": "engine",
        "telemetry": "",
        "frontend": "engine text grammar auth telemetry",
        "loading": "frontend disk_cache engine sampling text grammar machine",
        "process": "loading engine auth telemetry",
        "api": "frontend auth text telemetry machine",
        "http": "api frontend text auth telemetry",
        "kserve": "api frontend text auth telemetry",
        "serve": "process api http kserve frontend loading engine auth telemetry machine",
        "doctor": "serve loading engine text machine",
        "cluster": "serve api frontend loading auth telemetry",
        "client": "",
        "client/tools": "client",
        "cli": "client serve auth",
        "commands": "cli",
    },
    "export": {
        "bundle": "",
        "operators": "",
        "version": "operators",
        "quantize": "operators",
        "graph": "quantize bundle",
        "verify": "quantize bundle operators",
        "exportability": "quantize graph operators",
        "pipeline": "exportability quantize graph verify bundle version",
        "convert": "graph",
        "cli": "exportability pipeline verify quantize bundle operators version",
        "commands": "",
    },
    "model": {
        "network": "",
        "data": "network",
        "checkpoint": "network data",
        "reference": "network",
        "training": "network data checkpoint reference",
        "sources": "data checkpoint",
        "importers": "network data checkpoint sources",
        "evaluation": "training network data checkpoint reference importers",
        "benchmarks": "evaluation importers training data checkpoint reference",
        "commands": "sources",
    },
    "loadtest": {
        "environment": "",
        "protocols": "",
        "workload": "protocols",
        "results": "workload protocols environment",
        "locust_users": "workload protocols environment",
        "locustfile": "locust_users workload protocols environment",
        "run": "workload protocols environment results",
        "bench/backends": "workload protocols environment",
        "bench": "bench/backends workload protocols environment results",
        "commands": "run bench",
    },
    "protos": {},
}
TORCH_FREE = ("server", "protos", "loadtest")
# They run in the peers' virtual environment, as processes of their own.
PEERS = {f"loadtest/bench/backends/{name}.py" for name in ("transformers", "prepare")}


def source_files(package: str) -> list[Path]:
    """A package's files, relative to the root."""
    return sorted(path.relative_to(ROOT) for path in (ROOT / package).rglob("*.py"))


SOURCES = [path for package in PACKAGES for path in source_files(package)]


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse((ROOT / path).read_text(encoding="utf-8"))


def imported(path: Path) -> Iterator[str]:
    """Every module that a file imports, at the top or inside a function, with what it takes."""
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def own_imports(path: Path) -> Iterator[str]:
    """Those of ours, as the path of the file that they are in."""
    for name in imported(path):
        if not name.startswith("quill."):
            continue
        place = Path(*name.split(".")[1:])
        while not (ROOT / place).with_suffix(".py").exists() and not (ROOT / place).is_dir():
            place = place.parent
        yield place.as_posix()


def folder_of(place: Path, package: str) -> str:
    """The line of WITHIN that a module belongs to; "" for the values at the package's root."""
    inside = place.relative_to(package).with_suffix("").as_posix()
    lines = [each for each in WITHIN[package] if inside == each or inside.startswith(f"{each}/")]
    return max(lines, key=len, default="")


def allowed_between(path: Path) -> set[str]:
    lines = [each for each in BETWEEN if path.as_posix().startswith(f"{each}/")]
    return {each.replace(".", "/") for each in BETWEEN[max(lines, key=len)].split()}


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_imports_only_what_it_may_of_the_others(package: str) -> None:
    for path in source_files(package):
        allowed = allowed_between(path)
        for place in own_imports(path):
            if place.partition("/")[0] != package:
                names = {place, *(parent.as_posix() for parent in Path(place).parents)}
                assert names & allowed, f"{path} imports {place}"


@pytest.mark.parametrize("package", PACKAGES)
def test_a_folder_imports_only_what_it_may_of_its_package(package: str) -> None:
    for path in source_files(package):
        here = folder_of(path, package)
        allowed = {here, "", *WITHIN[package].get(here, "").split()}
        for place in own_imports(path):
            if Path(place).parts[0] == package and place != package:
                assert folder_of(Path(place), package) in allowed, f"{path} imports {place}"


@pytest.mark.parametrize("package", PACKAGES)
def test_folders_go_one_way(package: str) -> None:
    lower: set[str] = set()
    for folder, allowed in WITHIN[package].items():
        assert set(allowed.split()) <= lower, f"{folder} may import what stands above it"
        lower.add(folder)


@pytest.mark.parametrize("package", PACKAGES)
def test_every_folder_is_in_the_table_and_can_be_seen_at_a_glance(package: str) -> None:
    for folder in {path.parent for path in source_files(package)}:
        modules = [path for path in (ROOT / folder).glob("*.py") if path.name != "__init__.py"]
        assert len(modules) <= MAX_MODULES, folder
        assert (ROOT / folder / "__init__.py").exists(), folder
        assert (
            folder.as_posix() == package
            or folder.relative_to(package).as_posix() in WITHIN[package]
        )


def test_there_are_no_other_packages() -> None:
    with_code = {path.parts[0] for path in (p.relative_to(ROOT) for p in ROOT.glob("*/**/*.py"))}
    assert {each for each in with_code if each[0] != "."} - {"build"} == {*PACKAGES, "tests"}


def test_ours_are_imported_by_their_whole_name() -> None:
    # From the root of a checkout `import server` would work, and in an installation it wouldn't.
    tests = [path.relative_to(ROOT) for path in (ROOT / "tests").rglob("*.py")]
    for path in (*SOURCES, *tests):
        short = {name.partition(".")[0] for name in imported(path)} & set(PACKAGES)
        assert not short, f"{path} imports {short}"


@pytest.mark.parametrize("package", TORCH_FREE)
def test_a_serving_package_never_imports_torch(package: str) -> None:
    for path in source_files(package):
        if path.as_posix() not in PEERS:
            assert "torch" not in {name.partition(".")[0] for name in imported(path)}, path


def needed(start: str) -> set[str]:
    """The modules that a module imports, at the top or inside a function, and that those do."""
    found, left = set[str](), [start]
    while left:
        if (path := left.pop()) not in found:
            found.add(path)
            places = [f"{place}.py" for place in own_imports(Path(path))]
            left += [place for place in places if (ROOT / place).exists()]
    return found


@pytest.mark.parametrize(
    ("start", "packages", "without"),
    [
        ("model/importers/import_weights.py", ("model",), NOT_IMPORTER),
        ("export/cli/export.py", ("export", "model"), NOT_EXPORTER),
    ],
)
def test_the_hash_of_the_code_that_makes_something_forgets_no_module_of_it(
    start: str, packages: tuple[str, ...], without: tuple[str, ...]
) -> None:
    assert needed(start) <= set(map(str, code_of(packages, without)))
    for path in without:
        assert (ROOT / path).exists(), f"{path} is gone: leave it out"


@pytest.mark.parametrize("path", SOURCES, ids=str)
def test_a_module_opens_by_saying_what_it_is(path: Path) -> None:
    if path.name.endswith(("_pb2.py", "_pb2_grpc.py")):
        return
    tree = parsed(path)
    assert ast.get_docstring(tree), path
    if path.name == "__init__.py":
        assert len(tree.body) == 1, "a package is its modules"
