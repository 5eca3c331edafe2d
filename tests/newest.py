"""`make test-newest`: the tests that touch grpcio, h11, ONNX Runtime and Ray, with the newest ones.

Makes .venv-newest, installs there the newest releases that PyPI has, without our constraints, and
lets everything else come from .venv. Bounds of pyproject.toml aren't looked at: the point is to
learn whether they can be raised. A package that can't be installed is named, and its pin is used.
"""

import importlib.metadata
import os
import platform
import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PLACE = ROOT / ".venv-newest"
_IS_X86 = sys.platform == "linux" and platform.machine() == "x86_64"
# Installed together, since they must fit each other.
PACKAGES = (
    ("grpcio", "grpcio-health-checking", "grpcio-reflection", "grpcio-status"),
    ("h11",),
    ("onnxruntime-gpu" if _IS_X86 else "onnxruntime",),
    ("ray[serve]",),
)
TESTS = (
    "tests/server/api",
    "tests/server/kserve",
    "tests/server/http",
    "tests/server/serve",
    "tests/server/loading",
    "tests/server/machine",
    "tests/server/engine/test_kv_cache.py",
    "tests/server/end_to_end/test_lifecycle.py",
    "tests/server/end_to_end/test_reload.py",
    "tests/server/end_to_end/test_process.py",
    "tests/server/end_to_end/test_fuzz.py",
    "tests/server/client",
    "tests/server/cluster",
)


def main() -> int:
    make_environment()
    failed = [package for group in PACKAGES for package in install(*group)]
    inherit()
    for name in (package.partition("[")[0] for group in PACKAGES for package in group):
        print(f"{name}: {version_of(sys.executable, name)} -> {version_of(python(), name)}")
    if failed:
        print(f"not installed, so the pin is tested: {', '.join(failed)}", flush=True)
    command = [python(), "-m", "pytest", "-q", "-m", "not page", *TESTS, *sys.argv[1:]]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode


def python() -> str:
    return str(PLACE / "bin/python")


def make_environment() -> None:
    subprocess.run([sys.executable, "-m", "venv", "--clear", PLACE], check=True)


def install(*packages: str) -> list[str]:
    """What couldn't be installed. Constraints of the caller's environment don't hold."""
    environment = {name: value for name, value in os.environ.items() if name != "PIP_CONSTRAINT"}
    command = [python(), "-m", "pip", "install", "--quiet", "--upgrade", "--only-binary", ":all:"]
    done = subprocess.run([*command, *packages], env=environment, check=False)
    return [] if done.returncode == 0 else list(packages)


def inherit() -> None:
    """Everything else comes from this environment, after what was installed there."""
    inner = subprocess.run(
        [python(), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        capture_output=True,
        text=True,
        check=True,
    )
    line = f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n"
    (Path(inner.stdout.strip()) / "zz_inherited.pth").write_text(line, encoding="utf-8")


def version_of(interpreter: str, package: str) -> str:
    if interpreter == sys.executable:
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            return "none"
    script = f"import importlib.metadata as m; print(m.version({package!r}))"
    done = subprocess.run([interpreter, "-c", script], capture_output=True, text=True, check=False)
    return done.stdout.strip() or "none"


if __name__ == "__main__":
    sys.exit(main())
