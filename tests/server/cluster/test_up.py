"""`quill cluster up`, as a user types it."""

import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from quill.server.client.sync_client import Client
from quill.server.settings import Settings
from tests.server.cluster.clients import NUM_TOKENS, PROMPT, TIMEOUT_S, text_of
from tests.server.cluster.running_cluster import free_port, make_plan
from tests.server.process import ROOT

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

COMMAND = [
    *(sys.executable, "-m", "quill", "cluster", "up", "--replicas", "1", "--threads", "1"),
    *("--kv-cache-mb", "256", "--metrics-port", "off"),
]
# An application of Ray Serve alone: how it is stopped doesn't depend on what it does.
STOPPING = """
import pickle, sys, threading
from quill.server.cluster.local_ray import local_ray, stop
from quill.server.cluster.plan import APPLICATION

class Nothing:
    pass

with local_ray(pickle.loads(bytes.fromhex(sys.argv[1]))):
    from ray import serve
    application = serve.deployment(Nothing).bind()
    target = serve.RunTarget(application, name=APPLICATION, route_prefix=None)
    serve.start(proxy_location="Disabled")
    serve.run_many([target])
    before = {*threading.enumerate()}
    stop(threading.Event().wait)
    print(sorted(each.name for each in {*threading.enumerate()} - before))
"""


def test_up_prints_a_command_reloads_on_sighup_and_finishes_calls_on_ctrl_c(
    bundle: Path, texts: dict[int, str], tmp_path: Path
) -> None:
    copy, log, port = tmp_path / "bundle", tmp_path / "log", free_port()
    shutil.copytree(bundle, copy, copy_function=os.link)
    with log.open("wb") as errors:
        process = subprocess.Popen(
            [*COMMAND, str(copy), "--port", str(port)],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            cwd=ROOT,
            start_new_session=True,
        )
    assert process.stdout is not None
    try:
        printed = iter(process.stdout)
        assert next(printed).startswith("Starting Ray")
        process.send_signal(signal.SIGHUP)  # it reloads once there is a replica
        assert any(line.startswith(f"Serving at 127.0.0.1:{port}") for line in printed)
        assert f"generate --address 127.0.0.1:{port}" in next(printed)
        assert next(printed).startswith("every replica has")
        with Client(f"127.0.0.1:{port}") as client:
            assert text_of(client, 1) == texts[1]
            manifest = json.loads((copy / "manifest.json").read_text()) | {"name": "other"}
            (copy / "manifest.json").unlink()
            (copy / "manifest.json").write_text(json.dumps(manifest))
            process.send_signal(signal.SIGHUP)
            assert any(line.startswith("every replica has") for line in printed)
            assert client.model(timeout_s=TIMEOUT_S).name == "other"
            chunks = client.stream(PROMPT, seed=1, max_new_tokens=NUM_TOKENS, timeout_s=TIMEOUT_S)
            begun = next(chunks).text
            os.killpg(process.pid, signal.SIGINT)  # as a terminal does on Ctrl-C
            assert any(line.startswith("Stopping") for line in printed)
            assert begun + "".join(chunk.text for chunk in chunks) == texts[1]
        assert list(printed) == [], "nothing of Ray's"
        assert (process.wait(TIMEOUT_S), log.read_text()) == (0, "")
    except BaseException:
        print(log.read_text("utf-8", "replace")[-5000:])
        raise
    finally:
        process.kill()
        process.communicate()


def test_error_of_a_replica_that_does_not_start_is_printed_without_its_traceback(
    bundle: Path,
) -> None:
    command = [*COMMAND, str(bundle), "--context", "9999999", "--port", str(free_port())]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 1, done.stderr
    text = "quill: the replicas don't start: --context is 9999999; the model"
    assert done.stderr.startswith(text)
    assert done.stderr.count("\n") == 1


def test_stopping_leaves_no_thread_that_could_call_ray_while_it_shuts_down(bundle: Path) -> None:
    """Such a call ends the process with exit code 1, and raises nothing."""
    plan = pickle.dumps(make_plan(bundle, Settings(threads=1))).hex()
    command = [sys.executable, "-c", STOPPING, plan]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    print(done.stderr)
    assert (done.returncode, done.stdout, done.stderr) == (0, "[]\n", "")
