"""A server tells nobody that it runs: no name is looked up, and nothing is written at home."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.server.process import ask, server_process, wait_until
from tests.server.tiny_bundle import TinyBundle

HOMES = ("HOME", "XDG_CACHE_HOME", "XDG_DATA_HOME", "XDG_CONFIG_HOME", "XDG_STATE_HOME")
VARIABLE = "ORT_DISABLE_TELEMETRY"
# The runtime is silent by itself where one of these says that nobody sits there.
AUTOMATIC = [
    "CI",
    "TF_BUILD",
    "GITHUB_ACTIONS",
    "GITLAB_CI",
    "CIRCLECI",
    "TRAVIS",
    "JENKINS_URL",
    "CODEBUILD_BUILD_ID",
    "BUILDKITE",
    "TEAMCITY_VERSION",
    "APPVEYOR",
    "BITBUCKET_BUILD_NUMBER",
]
# Each name that a process wants to know goes into a file, and isn't looked up.
SPY = r"""
#include <fcntl.h>
#include <netdb.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

extern "C" int getaddrinfo(const char* name, const char*, const addrinfo*, addrinfo**) {
  int file = open(getenv("SPY_LOG"), O_WRONLY | O_CREAT | O_APPEND, 0600);
  if (name != nullptr && (write(file, name, strlen(name)) < 0 || write(file, "\n", 1) < 0)) abort();
  close(file);
  return EAI_NONAME;
}
"""


@pytest.fixture(scope="module")
def spy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("g++") is None:
        pytest.skip("there is no g++ here to make the spy with")
    library = tmp_path_factory.mktemp("spy") / "spy.so"
    command = ["g++", "-shared", "-fPIC", "-x", "c++", "-", "-o", str(library)]
    subprocess.run(command, input=SPY, text=True, check=True)
    return library


def spied_on(spy: Path, home: Path, **changes: str) -> dict[str, str]:
    """The environment of a process with a new home, whose questions are in `names` beside it."""
    home.mkdir()
    homes = {name: str(home / name.lower()) for name in HOMES}
    watched = {"LD_PRELOAD": str(spy), "SPY_LOG": str(home.with_suffix(".names"))}
    return homes | watched | changes


def names_in(home: Path) -> set[str]:
    return {path.name for path in home.rglob("*") if path.is_file()}


def test_server_looks_no_name_up_and_leaves_nothing_at_home(
    spy: Path, tiny_bundle: TinyBundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (VARIABLE, *AUTOMATIC):
        monkeypatch.delenv(name, raising=False)
    quiet, chatty = tmp_path / "quiet", tmp_path / "chatty"
    ours, asked_for = spied_on(spy, quiet), spied_on(spy, chatty, **{VARIABLE: "0"})
    bundle = tiny_bundle.directory
    with (
        server_process(bundle, tmp_path / "quiet.log", environment=ours) as server,
        server_process(bundle, tmp_path / "chatty.log", environment=asked_for) as other,
    ):
        assert ask(server) == ask(other)
        # The second one shows what is looked for. It collects at once what it is going to tell, and
        # looks a name up only where it thinks that there is a network: not everywhere, nor soon.
        collected = "the runtime notes what it tells its maker, if it may"
        wait_until(lambda: {"deviceid", "onnxruntime.db"} <= names_in(chatty), collected)
    assert names_in(quiet) == set()
    assert not quiet.with_suffix(".names").exists()


@pytest.mark.parametrize(
    "module",
    [
        "quill.export.pipeline",
        "quill.export.verify.runner",
        "quill.server.engine.model_runner",
        "quill.loadtest.bench.backends.quill_engine",
    ],
)
def test_whoever_imports_a_package_is_shown_neither(module: str, tmp_path: Path) -> None:
    silent = {VARIABLE, *AUTOMATIC}
    environment = {name: value for name, value in os.environ.items() if name not in silent}
    homes = {name: str(tmp_path / name) for name in HOMES}
    subprocess.run(
        [sys.executable, "-c", f"import {module}"],
        env=environment | homes,
        check=True,
        cwd=Path(__file__).parents[3],
    )
    assert list(tmp_path.rglob("Microsoft")) == []
