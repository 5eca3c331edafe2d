"""`quill cluster up`, as a person types it."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from quill.server.client.sync_client import Client
from quill.server.cluster.environment import free_port
from quill.server.cluster.replica.options import ReplicaOptions
from tests.server.cluster.crowd import NUM_TOKENS, PROMPT, TIMEOUT_S, text_of
from tests.server.process import ROOT

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

OPTIONS = ("--replicas", "1", "--threads", "1", "--kv-cache-mb", "256", "--metrics-port", "off")


def test_cluster_says_what_to_type_reloads_on_sighup_and_finishes_answers_on_ctrl_c(
    options: ReplicaOptions, texts: dict[int, str], tmp_path: Path
) -> None:
    bundle, port = tmp_path / "bundle", free_port()
    bundle.mkdir()
    for file in Path(options.bundle).iterdir():
        os.link(file, bundle / file.name)
    command = [sys.executable, "-m", "quill", "cluster", "up", str(bundle), "--port", str(port)]
    with (tmp_path / "log").open("wb") as errors:
        process = subprocess.Popen(
            [*command, *OPTIONS],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            cwd=ROOT,
            start_new_session=True,
        )
    assert process.stdout is not None
    try:
        said = iter(process.stdout)
        assert next(said).startswith("Starting Ray")
        process.send_signal(signal.SIGHUP)  # it waits until there is something to reload
        assert any(line.startswith(f"Serving at 127.0.0.1:{port}") for line in said)
        assert f"generate --address 127.0.0.1:{port}" in next(said)
        assert next(said).startswith("every replica has")
        with Client(f"127.0.0.1:{port}") as client:
            assert text_of(client, 1) == texts[1]
            manifest = json.loads((bundle / "manifest.json").read_text()) | {"name": "other"}
            (bundle / "manifest.json").unlink()
            (bundle / "manifest.json").write_text(json.dumps(manifest))
            process.send_signal(signal.SIGHUP)
            assert any(line.startswith("every replica has") for line in said)
            assert client.model(timeout_s=TIMEOUT_S).name == "other"
            chunks = client.stream(PROMPT, seed=1, max_new_tokens=NUM_TOKENS, timeout_s=TIMEOUT_S)
            begun = next(chunks).text
            os.killpg(process.pid, signal.SIGINT)  # as a terminal does it on Ctrl-C: to all of them
            assert any(line.startswith("Stopping") for line in said)
            assert begun + "".join(chunk.text for chunk in chunks) == texts[1]
        assert list(said) == [], "nothing of Ray's"
        assert process.wait(TIMEOUT_S) == 0
        assert (tmp_path / "log").read_text() == ""
    finally:
        process.kill()
        process.communicate()


def test_replicas_that_do_not_start_say_why_in_their_own_words(options: ReplicaOptions) -> None:
    command = [
        sys.executable,
        "-m",
        "quill",
        "cluster",
        "up",
        options.bundle,
        "--context",
        "9999999",
    ]
    port = str(free_port())
    told = subprocess.run(
        [*command, *OPTIONS, "--port", port], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert told.returncode == 1
    assert told.stderr.startswith(
        "quill: the replicas don't start: --context is 9999999; the model"
    )
    assert told.stderr.count("\n") == 1
