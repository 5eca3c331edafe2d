"""What a serving machine installs is pinned by hash, and agrees with constraints.txt."""

import re
import tomllib
from pathlib import Path

from quill import pins

ROOT = Path(__file__).resolve().parents[1]
LINE = re.compile(r"([a-z0-9-]+)==(\S+) --hash=sha256:([0-9a-f]{64})")


def constraints() -> dict[str, str]:
    found = [line.partition("==") for line in pins.CONSTRAINTS.read_text().splitlines()]
    return {pins.normal(name): version for name, equals, version in found if equals}


def hashed() -> dict[str, str]:
    content = pins.HASHED.read_text().splitlines()
    matches = [LINE.fullmatch(line) for line in content if not line.startswith("#")]
    assert all(matches), "every line is a name, a version and one hash"
    return {match[1]: match[2] for match in matches if match}


def test_hashed_requirements_have_the_versions_of_the_constraints() -> None:
    pinned = constraints()
    assert {name: pinned.get(name) for name in hashed()} == hashed()


def test_all_that_serving_asks_for_is_hashed_and_torch_is_not() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    asked = [*extras["serve"], *extras["tracing"]]
    names = {pins.normal(re.split(r"[<>=\[;]", each)[0]) for each in asked}
    # The other build of the runtime is for other platforms.
    assert names - {"quill", "onnxruntime"} <= set(hashed())
    assert not {"torch", "transformers"} & set(hashed())


def test_lines_come_from_pips_report() -> None:
    report = {
        "install": [
            {
                "metadata": {"name": "Some_Package", "version": "1.2"},
                "download_info": {"archive_info": {"hashes": {"sha256": "f" * 64}}},
            },
            {"metadata": {"name": "quill", "version": "0"}, "download_info": {"dir_info": {}}},
        ]
    }
    assert pins.lines(report) == [f"some-package==1.2 --hash=sha256:{'f' * 64}"]
