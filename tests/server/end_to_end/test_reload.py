"""Another bundle takes over: nobody notices, and nothing of the old one stays."""

import gc
import shutil
import signal
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from quill.__main__ import main
from quill.export.bundle import graph_contract
from quill.protos import generation_pb2 as pb
from quill.protos import generation_pb2_grpc as pb_grpc
from quill.server.auth.key_file import add_key
from quill.server.client.access import Access
from quill.server.client.sync_client import Client
from quill.server.engine.engine import Engine
from quill.server.errors import ReloadError, StartError
from quill.server.loading.instance import ModelInstance
from quill.server.loading.loader import in_thread
from quill.server.request import Limits
from tests.bad_files import agree
from tests.server.end_to_end.test_lifecycle import NEVER, Caller, ask, start_one
from tests.server.end_to_end.test_process import WITHOUT_TORCH, change_manifest
from tests.server.process import PATIENCE_S, server_process, wait_until
from tests.server.process import ask as ask_process
from tests.server.running import (
    NOT_SERVING,
    SERVING,
    Running,
    health_of,
    make_manifest,
    make_served,
    running_server,
)
from tests.server.scripted_session import TIMEOUT_S, Reciter
from tests.server.tiny_bundle import TinyBundle


def second(max_num_seqs: int = 2) -> ModelInstance:
    """Another bundle, by its name and its limits."""
    served = make_served(max_num_seqs, manifest=make_manifest(name="second"))
    num_blocks = max_num_seqs * (served.context // 16 + 1)
    limits = Limits(max_num_seqs=max_num_seqs, context=served.context, num_blocks=num_blocks)
    return ModelInstance(served, in_thread(Engine(Reciter(), limits)))


def name_of(running: Running) -> str:
    with Client(running.address, NEVER) as client:
        return client.model(timeout_s=TIMEOUT_S).name


def test_new_calls_go_to_the_new_bundle_and_old_ones_are_finished_on_the_old() -> None:
    with running_server() as running:
        running.load_again = second
        old = weakref.ref(running.server.reloader.instance.engine)  # type: ignore[union-attr]
        caller = start_one(running, max_new_tokens=20)
        running.call(running.server.reload())
        assert name_of(running) == "second"
        assert ask(running) == "de"
        assert running.session.num_steps == 1, "the old one is held, the new one isn't"
        assert old() is not None
        running.session.let_go()
        assert caller.text() == "efghijklmnopqrstuvw"
        caller.close()
        running.wait_for(lambda: old() is None)
        assert health_of(running) == SERVING


@pytest.fixture
def no_collector() -> Iterator[None]:
    """Only what frees by itself, or collects on purpose, frees."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collector")
def test_old_bundle_is_freed_at_once_and_not_when_chance_will_have_it() -> None:
    looked = threading.Event()

    def look(busy_since_s: float | None, describe: Callable[[], str]) -> bool:
        looked.set()
        return False

    with running_server(watchdog_s=2.0) as running:
        running.load_again = second
        reloader = running.server.reloader
        old = weakref.ref(reloader.instance.engine)  # type: ignore[union-attr]
        reloader._watchdog.look = look  # type: ignore[method-assign]
        assert looked.wait(TIMEOUT_S), "the watchdog must not hold on to what it has seen"
        running.call(running.server.reload())
        running.wait_for(lambda: not reloader._tasks)
        assert old() is None


def test_waiting_calls_are_finished_too() -> None:
    with running_server(max_num_seqs=1) as running:
        running.load_again = second
        first = start_one(running, max_new_tokens=3)
        waiting = Caller(running, max_new_tokens=3)
        running.wait_for_waiting(1)
        running.call(running.server.reload())
        running.session.let_go()
        assert (first.text(), waiting.text()) == ("ef", "def")
        first.close()
        waiting.close()


@pytest.mark.parametrize("error", [StartError("damaged"), RuntimeError("a bug in the runtime")])
def test_bad_bundle_is_refused_and_the_old_one_goes_on(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    def load() -> ModelInstance:
        raise error

    with running_server() as running:
        running.load_again = load
        with pytest.raises(ReloadError, match=f"the old one goes on: {error}"):
            running.call(running.server.reload())
        assert caplog.text.count(f"the old one goes on: {error}") == 1
        assert (health_of(running), ask(running)) == (SERVING, "de")
        running.load_again = second
        running.call(running.server.reload())
        assert name_of(running) == "second"


def test_one_at_a_time() -> None:
    begun, go_on = threading.Event(), threading.Event()

    def load() -> ModelInstance:
        begun.set()
        assert go_on.wait(TIMEOUT_S)
        return second()

    with running_server() as running:
        running.load_again = load
        running._loop.call_soon_threadsafe(running.server.reload_soon)
        assert begun.wait(TIMEOUT_S)
        with pytest.raises(ReloadError, match="already"):
            running.call(running.server.reload())
        assert ask(running) == "de"
        go_on.set()
        running.wait_for(lambda: name_of_instance(running) == "second")


def name_of_instance(running: Running) -> str:
    instance = running.server.reloader.instance
    assert instance is not None
    return instance.served.manifest.name


def test_new_bundle_cures_a_server_whose_steps_hang() -> None:
    with running_server(watchdog_s=0.1) as running:
        running.session.hold()
        caller = Caller(running)
        running.wait_for(lambda: "hanging" in running.server.health._problems)
        assert health_of(running) == NOT_SERVING
        running.load_again = second
        running.call(running.server.reload())
        running.wait_for(lambda: not running.server.health._problems)
        assert ask(running) == "de"
        running.session.let_go()
        caller.close()


def test_stopping_ends_both_bundles() -> None:
    with running_server(drain_timeout_s=0.0) as running:
        running.load_again = second
        caller = start_one(running)
        running.call(running.server.reload())
        running.stop()
        running.call(running.server.closing.wait())
        running.session.let_go(1)  # more would answer the call
        assert caller.error() is grpc.StatusCode.UNAVAILABLE
        running.session.let_go()
        running.join()
        caller.close()


def reload_call(running: Running, secret: str | None) -> pb.ReloadResponse:
    with grpc.insecure_channel(running.address) as channel:
        stub: Any = pb_grpc.AdministrationStub(channel)
        metadata = Access(api_key=secret).metadata
        reply: pb.ReloadResponse = stub.Reload(
            pb.ReloadRequest(), timeout=TIMEOUT_S, metadata=metadata
        )
        return reply


def reload_refusal(running: Running, secret: str | None) -> grpc.StatusCode:
    with pytest.raises(grpc.RpcError) as caught:
        reload_call(running, secret)
    code: grpc.StatusCode = caught.value.code()
    return code


def test_only_an_administrator_may_reload(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    boss, user = add_key(path, "boss", admin=True), add_key(path, "user")
    with running_server(api_keys=path) as running:
        running.load_again = second
        assert reload_refusal(running, None) is grpc.StatusCode.UNAUTHENTICATED
        assert reload_refusal(running, user) is grpc.StatusCode.PERMISSION_DENIED
        assert name_of_instance(running) == "reciter"
        assert reload_call(running, boss).model.name == "second"
        running.load_again = lambda: pytest.fail("damaged")
        assert running.next_record("OK").method == "Reload"


def test_without_keys_nobody_may_reload_by_call_and_the_error_says_what_to_do(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with running_server() as running:
        running.load_again = second
        assert reload_refusal(running, None) is grpc.StatusCode.UNIMPLEMENTED
        assert main(["reload", "--address", running.address]) == 1
        assert name_of_instance(running) == "reciter"
        assert running.next_record("UNIMPLEMENTED").method == "Reload"
    errors = capsys.readouterr().err
    for advice in ("started without --api-keys", "quill keys add FILE NAME --admin", "SIGHUP"):
        assert advice in errors
    assert errors.count("\n") == 1


def test_command_line_reloads_and_checks_health(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "keys.json"
    monkeypatch.setenv("QUILL_API_KEY", add_key(path, "boss", admin=True))
    with running_server(api_keys=path, wait=False) as running:
        capsys.readouterr()
        address = ["--address", running.address]
        assert main(["health", *address]) == 1
        assert "is NOT_SERVING" in capsys.readouterr().err
        running.loading.set()
        running.call(running.server.ready.wait())
        capsys.readouterr()
        assert main(["health", *address]) == 0
        assert capsys.readouterr().out == "SERVING\n"
        running.load_again = second
        assert main(["reload", *address]) == 0
        assert capsys.readouterr().out == "second is loaded: fp32, up to 2 sequences\n"
    assert main(["health", *address]) == 1
    assert "quill: " in capsys.readouterr().err


def test_process_reloads_at_a_signal_while_clients_go_on_calling(
    tiny_bundle: TinyBundle, tmp_path: Path
) -> None:
    bundle = Path(shutil.copytree(tiny_bundle.directory, tmp_path / "bundle"))
    names, over = list[str](), threading.Event()

    def call_all_the_time(address: str) -> None:
        with Client(address, NEVER) as client:
            while not over.is_set():
                client.generate([5, 6, 7], seed=3, max_new_tokens=8, timeout_s=60)
                names.append(client.model(timeout_s=60).name)

    with (
        server_process(bundle, tmp_path / "log", code=WITHOUT_TORCH) as server,
        Client(server.address, NEVER) as client,
    ):

        def reload(name: str, message: str) -> None:
            change_manifest(bundle, name=name)
            server.signal(signal.SIGHUP)
            wait_until(lambda: message in server.log, message)
            assert client.model(timeout_s=60).name == "second"

        before = ask_process(server)
        thread = threading.Thread(target=call_all_the_time, args=(server.address,))
        thread.start()
        reload("second", "second is on duty")
        wait_until(lambda: "has gone" in server.log, "the old bundle is freed")
        shutil.move(bundle / "weights.fp32.bin", tmp_path / "aside")
        (bundle / "weights.fp32.bin").write_bytes(b"damaged")
        reload("third", "refused, and the old one goes on")
        over.set()
        thread.join(60)
        assert ask_process(server) == before
        assert set(names) <= {tiny_bundle.manifest.name, "second"}
        assert "second" in names
        server.signal(signal.SIGTERM)
        assert server.process.wait(PATIENCE_S) == 0
        assert "Traceback" not in server.log


def read_out_of_bounds(path: Path) -> None:
    """Adds a node whose source has no positions, and whose block is far outside of the cache."""
    model = onnx.load(path, load_external_data=False)
    (logits,) = (node for node in model.graph.node if graph_contract.LOGITS in node.output)
    logits.output[list(logits.output).index(graph_contract.LOGITS)] = "honest"
    constants = {
        "cache": np.ones((1, 1, 16, 16), np.float32),
        "starts": np.array([0, 0, 2], np.int32),
        "lengths": np.array([0, 1], np.int32),
        "table": np.array([[2**27], [0]], np.int32),
    }
    made = [numpy_helper.from_array(array, f"hostile_{name}") for name, array in constants.items()]
    model.graph.initializer.extend(made)
    ends = helper.make_node("Ends", [each.name for each in made], ["ends"], domain="quill")
    heads = {"heads": 1, "kv_heads": 1, "head_size": 16, "scale": 1.0}
    ends.attribute.extend(helper.make_attribute(*each) for each in heads.items())
    total = helper.make_node("ReduceSum", ["ends"], ["total"], keepdims=0)
    added = helper.make_node("Add", ["honest", "total"], [graph_contract.LOGITS])
    model.graph.node.extend([ends, total, added])
    onnx.save(model, path)
    agree(path)


def test_bundle_whose_graph_reads_out_of_bounds_is_refused_and_the_old_one_goes_on(
    tiny_bundle: TinyBundle, tmp_path: Path
) -> None:
    """Its hashes are right: whoever writes a bundle writes them."""
    bundle = Path(shutil.copytree(tiny_bundle.directory, tmp_path / "bundle"))
    with server_process(bundle, tmp_path / "log", code=WITHOUT_TORCH) as server:
        before = ask_process(server)
        for path in bundle.glob("decoder.*.onnx"):
            read_out_of_bounds(path)
        server.signal(signal.SIGHUP)
        refused = "refused, and the old one goes on"
        wait_until(lambda: refused in server.log or server.process.poll() is not None, refused)
        assert "a source without positions" in server.log
        assert ask_process(server) == before
