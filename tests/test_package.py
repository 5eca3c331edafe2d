"""What `pip install` brings: every sub-package, the C++ sources, the page, one importable name."""

import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("model", "export", "server", "protos", "loadtest")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy: building leaves things behind."""
    copy = tmp_path_factory.mktemp("source")
    names = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout.split("\0")  # fmt: skip
    for name in filter(None, names):
        if (ROOT / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            (copy / name).write_bytes((ROOT / name).read_bytes())
    out = tmp_path_factory.mktemp("wheel")
    options = ["--no-deps", "--no-build-isolation", "--disable-pip-version-check", "--quiet"]
    command = [sys.executable, "-m", "pip", "wheel", *options, "-w", str(out), str(copy)]
    subprocess.run(command, check=True)
    (found,) = out.glob("quill-*.whl")
    return found


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("site")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(directory)
    return directory


def test_every_package_is_named_in_pyproject() -> None:
    named = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    found = {
        path.parent.relative_to(ROOT)
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
    }
    assert named == sorted({"quill", *(".".join(["quill", *path.parts]) for path in found)})


def test_a_wheel_has_every_module_the_sources_of_the_operators_and_the_page(
    installed: Path,
) -> None:
    kernels = ROOT / "export" / "operators" / "kernels"
    sources = [*kernels.glob("*.h"), *kernels.glob("*.cpp")]
    assert len(sources) > 10
    page = [*(ROOT / "server" / "http" / "page").iterdir()]
    assert len(page) > 5
    modules = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    for path in (*modules, *sources, *page, ROOT / "__main__.py", ROOT / "client.py"):
        assert (installed / "quill" / path.relative_to(ROOT)).is_file(), path


def test_a_wheel_brings_one_name(installed: Path) -> None:
    names = {path.name for path in installed.iterdir() if not path.name.endswith(".dist-info")}
    assert names == {"quill"}
    assert not (installed / "quill" / "tests").exists()


CLIENT = """
import sys
WANTED = {"quill", "grpc", "google", "typing_extensions", "server", "model"}
class Only:  # grpcio and protobuf are all that quill[client] brings
    def find_spec(self, name, path=None, target=None):
        first = name.partition(".")[0]
        if first not in {*WANTED, *sys.stdlib_module_names}:
            raise ModuleNotFoundError(name)
        if name.startswith("google.") and not name.startswith("google.protobuf"):
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Only())
import server, model  # the user's own
from quill.client import AsyncClient, CallError, Client
print(server.MINE, model.MINE, Client.__name__, sys.modules["quill"].__file__)
"""


@pytest.mark.parametrize("source", ["wheel", "clone"])
def test_a_client_needs_grpc_and_protobuf_alone_and_minds_no_module_of_the_users(
    source: str, installed: Path, tmp_path: Path
) -> None:
    for name in ("server", "model"):
        (tmp_path / f"{name}.py").write_text("MINE = 'mine'\n")
    (tmp_path / "app.py").write_text(CLIENT)
    path = {"PYTHONPATH": str(installed)} if source == "wheel" else {}
    done = subprocess.run(
        [sys.executable, "app.py"],
        cwd=tmp_path, capture_output=True, text=True, check=False, env=path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("mine mine Client ")
    assert (str(installed) in done.stdout) == (source == "wheel")


def test_a_command_runs_beside_a_users_model(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text("raise SystemExit('the wrong model')\n")
    command = [sys.executable, "-m", "quill", "train", "--help"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "usage: quill train" in done.stdout
