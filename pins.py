"""Makes requirements-serve.txt: what a serving machine installs, each file by its SHA-256.

`make pins` runs it. Versions come from constraints.txt; pip resolves them and says the hashes of
the files that it would install on this platform, so run it on the one that serves: Linux on
x86-64 with the Python that the Dockerfile names. Training isn't covered: torch is a CPU build
here and another one elsewhere, under the same version.

Knows: pip's report. Does not know: the rooms.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent
CONSTRAINTS = ROOT / "constraints.txt"
HASHED = ROOT / "requirements-serve.txt"
WANTED = ".[serve,tracing]"
HEADER = (
    "# What a serving machine installs, made by `make pins` from constraints.txt: Linux, x86-64,\n"
    "# Python {python}. Use: pip install --require-hashes -r requirements-serve.txt\n"
)


def main() -> None:
    report = resolve()
    python = ".".join(map(str, sys.version_info[:2]))
    HASHED.write_text(HEADER.format(python=python) + "\n".join(lines(report)) + "\n")
    print(f"{HASHED.name}: {len(report['install']) - 1} packages")


def resolve() -> dict[str, Any]:
    """What pip would install if nothing were there."""
    quiet = ["--disable-pip-version-check", "--quiet"]
    options = ["--dry-run", "--ignore-installed", "--only-binary", ":all:", "--report", "-"]
    command = [sys.executable, "-m", "pip", *quiet, "install", *options, WANTED]
    environment = os.environ | {"PIP_CONSTRAINT": str(CONSTRAINTS)}
    done = subprocess.run(command, cwd=ROOT, env=environment, check=True, stdout=subprocess.PIPE)
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def lines(report: dict[str, Any]) -> list[str]:
    """A requirement for each file. Quill itself comes from its directory and has no hash."""
    found = {}
    for each in report["install"]:
        if "archive_info" in each["download_info"]:
            name = normal(each["metadata"]["name"])
            sha256 = each["download_info"]["archive_info"]["hashes"]["sha256"]
            found[name] = f"{name}=={each['metadata']['version']} --hash=sha256:{sha256}"
    return [found[name] for name in sorted(found)]


def normal(name: str) -> str:
    """Names are the same whatever their case, dashes, dots and underscores."""
    return re.sub(r"[-_.]+", "-", name).lower()


if __name__ == "__main__":
    main()
