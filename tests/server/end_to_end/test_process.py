"""`quill serve` as a process of its own, in which importing torch raises."""

import json
import shutil
import signal
import socket
import subprocess
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from quill.export.bundle.manifest import MANIFEST_FILE, describe_file
from quill.export.precisions import Family
from quill.model.data.tokenizer import byte_tokenizer
from quill.server.client.sync_client import Client
from quill.server.engine.engine import Engine
from quill.server.errors import StartError
from quill.server.loading.choices import MIN_CONTEXT
from quill.server.loading.loader import Loader, warm_up
from quill.server.request import Limits
from tests.bad_files import SMALL
from tests.server.process import OPTIONS, PATIENCE_S, ROOT, ask, serve_command, server_process
from tests.server.scripted_session import TIMEOUT_S, Reciter
from tests.server.tiny_bundle import TinyBundle

WITHOUT_TORCH = (
    "import sys; sys.modules['torch'] = sys.modules['quill.model.network.transformer'] = None\n"
    "from quill.__main__ import main; sys.exit(main())"
)


def test_process_without_torch_serves_repeats_itself_and_ends_in_good_order(
    tiny_bundle: TinyBundle, tmp_path: Path
) -> None:
    with server_process(tiny_bundle.directory, tmp_path / "log", code=WITHOUT_TORCH) as server:
        with Client(server.address) as client:
            assert not client.model(timeout_s=60).has_tokenizer
        assert ask(server) == ask(server)
        server.signal(signal.SIGTERM)
        assert server.process.wait(PATIENCE_S) == 0
    assert "stopped" in server.log
    assert "Traceback" not in server.log


def test_systemd_is_told_of_ready_alive_and_stopping(
    tiny_bundle: TinyBundle, tmp_path: Path
) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.settimeout(TIMEOUT_S)
        systemd.bind(str(tmp_path / "notify"))
        given = {"NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": "30000"}
        with server_process(tiny_bundle.directory, tmp_path / "log", environment=given) as server:
            assert [systemd.recv(99) for _ in range(3)] == [b"READY=1", *[b"WATCHDOG=1"] * 2]
            server.signal(signal.SIGTERM)
            while (state := systemd.recv(99)) == b"WATCHDOG=1":
                pass
            assert state == b"STOPPING=1"
            assert server.process.wait(PATIENCE_S) == 0


@pytest.mark.parametrize("metrics", ["off", "0"])
def test_log_for_machines_is_json_from_the_first_line_to_the_last(
    tiny_bundle: TinyBundle, metrics: str
) -> None:
    process = subprocess.Popen(
        serve_command(
            tiny_bundle.directory, ["--log-format", "json", "--metrics-port", metrics, *OPTIONS]
        ),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,  # as containers have it
        text=True,
        cwd=ROOT,
    )
    try:
        assert process.stdout is not None
        entries = []
        for line in process.stdout:
            entries.append(json.loads(line))
            if entries[-1]["message"].startswith("serving at "):
                with Client(entries[-1]["address"]) as client:
                    client.generate([5, 6, 7], max_new_tokens=2, timeout_s=60)
                assert (entries[-1]["metrics"] is None) == (metrics == "off")
                if metrics != "off":
                    with urllib.request.urlopen(entries[-1]["metrics"], timeout=60) as reply:
                        assert b"quill_max_num_seqs" in reply.read()
                process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 0
    finally:
        process.kill()
        process.communicate()
    messages = [each["message"] for each in entries]
    assert "request" in messages
    assert messages[-1] == "stopped"


@pytest.fixture
def bundle(tiny_bundle: TinyBundle, tmp_path: Path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(tiny_bundle.directory, tmp_path / "bundle"))


def change_manifest(bundle: Path, **changes: Any) -> None:
    path = bundle / MANIFEST_FILE
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_model_that_cannot_run_does_not_start() -> None:
    session = Reciter()
    engine = Engine(session, Limits(max_num_seqs=1, context=8, num_blocks=4))
    warm_up(engine, "causal")
    assert session.num_steps == 2
    session.failures.append(RuntimeError("injected"))
    with pytest.raises(StartError, match="can't run"):
        warm_up(engine, "causal")


@pytest.mark.parametrize("family", ["causal", "seq2seq"])
def test_model_is_tried_in_the_smallest_context_too(family: Family) -> None:
    session = Reciter()
    limits = Limits(max_num_seqs=1, context=MIN_CONTEXT, num_blocks=4)
    warm_up(Engine(session, limits), family)
    assert session.num_steps


def test_bundle_with_a_tokenizer_and_a_template_takes_text(bundle: Path) -> None:
    byte_tokenizer().save(bundle / "tokenizer.json")
    files = json.loads((bundle / MANIFEST_FILE).read_text())["files"]
    change_manifest(
        bundle,
        tokenizer="tokenizer.json",
        files=[*files, vars(describe_file(bundle, "tokenizer.json"))],
        special_tokens={"bos": 0, "eos": 0, "pad": None, "unk": None},
        prepend_bos=True,
        chat_template="{{ bos_token + messages[0].content }}",
    )
    served = Loader(bundle, SMALL).load().served
    assert served.text is not None
    assert served.text.encode("a") == [0, ord("a") + 1]
    assert served.template is not None
    rendered = served.template.render([{"role": "user", "content": "a"}])
    assert served.text.encode_rendered(rendered) == [0, ord("a") + 1]
