"""The files that put a server into production say what the commands understand."""

import json
import re
import shlex
from pathlib import Path

from quill.__main__ import build_parser
from quill.server.settings import Settings, check_exposure, read_settings

ROOT = Path(__file__).resolve().parents[1]


def settings_of(words: list[str]) -> Settings:
    """What `quill serve` makes of them; other machines may call, so it must be protected."""
    settings = read_settings(build_parser().parse_args(words))
    check_exposure(settings)
    assert settings.host == "0.0.0.0"
    assert settings.tls is not None
    assert settings.api_keys is not None
    return settings


def dockerfile() -> str:
    return (ROOT / "Dockerfile").read_text().replace("\\\n", "")


def image_command(instruction: str) -> list[str]:
    """Of the image that serves; the cluster's has another one."""
    found, *_ = re.findall(rf"^{instruction} (\[.*\])$", dockerfile(), re.MULTILINE)
    words: list[str] = json.loads(found)
    return words


def unit(name: str) -> str:
    text = (ROOT / "quill.service").read_text().replace("\\\n", "")
    (found,) = re.findall(rf"^{name}=(.*)$", text, re.MULTILINE)
    return str(found)


def test_image_serves_protected_and_not_as_root() -> None:
    assert image_command("ENTRYPOINT") == ["quill", "serve"]
    settings_of([*image_command("ENTRYPOINT")[1:], *image_command("CMD")])
    stages = {
        stage.split("\n")[0].split()[-1]: re.findall(r"^USER (\S+)$", stage, re.MULTILINE)
        for stage in dockerfile().split("\nFROM ")[1:]
    }
    last = {name: users[-1] for name, users in stages.items() if not name.startswith("build")}
    assert last == dict.fromkeys(("cpu", "cuda", "cluster"), "10001")
    assert "--require-hashes -r requirements-serve.txt" in dockerfile()


def test_image_asks_for_health_as_the_command_is_called() -> None:
    (check,) = re.findall(r"HEALTHCHECK .* CMD (\[.*\])$", dockerfile(), re.MULTILINE)
    (options,) = re.findall(r'QUILL_HEALTH="(.*)"', dockerfile())
    words = shlex.split(json.loads(check)[2].replace("$QUILL_HEALTH", options))
    assert build_parser().parse_args(words[1:]).run == "quill.server.cli.operator:health"


def test_unit_serves_protected_and_has_time_to_drain() -> None:
    settings = settings_of(shlex.split(unit("ExecStart"))[1:])
    assert float(unit("TimeoutStopSec")) > settings.drain_timeout_s
    assert "-HUP" in unit("ExecReload")


def test_default_image_of_a_cluster_has_a_target() -> None:
    parsed = build_parser().parse_args(["cluster", "config", "bundle"])
    assert f"--target cluster -t {parsed.image} " in dockerfile()
    extras = ["cluster", "tracing"]
    assert f'".[{",".join(extras)}]"' in dockerfile()


def test_unit_is_ready_when_it_serves_and_is_restarted_when_it_hangs() -> None:
    settings = settings_of(shlex.split(unit("ExecStart"))[1:])
    assert (unit("Type"), unit("NotifyAccess")) == ("notify", "all")
    assert float(unit("WatchdogSec")) > settings.watchdog_s, "a long step is no reason yet"
