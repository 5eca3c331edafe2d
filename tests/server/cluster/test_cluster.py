"""Two replicas behind HAProxy give a single server's answers, whatever happens to replicas."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from quill.protos import generation_pb2 as pb
from quill.protos import generation_pb2_grpc as pb_grpc
from quill.protos import kserve_pb2 as kserve
from quill.protos import kserve_pb2_grpc as kserve_grpc
from quill.server.client.errors import CallError
from quill.server.client.sync_client import Client
from tests.server.cluster.clients import (
    NEVER,
    NUM_TOKENS,
    PATIENT,
    PROMPT,
    TIMEOUT_S,
    calling_clients,
    text_of,
)
from tests.server.cluster.conftest import Keys
from tests.server.cluster.running_cluster import LONGEST_ANSWER_S, START_S, RunningCluster
from tests.server.process import ROOT, wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]


def status_of(ask: Callable[[], object]) -> CallError:
    with pytest.raises(CallError) as caught:
        ask()
    return caught.value


def drain(client: Client, **options: Any) -> list[pb.GenerateChunk]:
    return list(client.stream(PROMPT, **options))


def test_streams_equal_a_single_servers_and_both_replicas_answer(
    cluster: RunningCluster, client: Client, texts: dict[int, str]
) -> None:
    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(lambda seed: text_of(client, seed), texts))
    assert found == list(texts.values())
    counts = cluster.metric("quill_requests_total", outcome="OK", method="GenerateStream")
    assert len(counts) == 2
    assert min(counts) > 0


def test_calls_with_a_shared_prefix_go_to_one_replica(client: Client) -> None:
    """Whose prefix cache has it."""

    def num_cached(story: int) -> int:
        prompt = f"Story {story}. " + 40 * "Once upon a time there was a lighthouse. "
        answer = client.generate(prompt, max_new_tokens=1, timeout_s=TIMEOUT_S)
        return answer.usage.cached_tokens

    for story in range(8):
        first, *others = [num_cached(story) for _ in range(3)]
        assert first < min(others)


def test_stream_arrives_token_by_token(client: Client) -> None:
    arrived_s = []
    for _ in client.stream(PROMPT, seed=1, max_new_tokens=NUM_TOKENS, timeout_s=TIMEOUT_S):
        arrived_s.append(time.monotonic())
    assert len(arrived_s) > NUM_TOKENS / 4
    assert arrived_s[-1] - arrived_s[0] > 0.05, "not all at once"


def test_errors_have_their_fields(client: Client) -> None:
    error = status_of(lambda: client.generate(PROMPT, temperature=-1.0))
    assert (error.code, error.field) == (grpc.StatusCode.INVALID_ARGUMENT, "temperature")
    error = status_of(lambda: drain(client, top_p=7.0))
    assert (error.code, error.field) == (grpc.StatusCode.INVALID_ARGUMENT, "top_p")


def test_deadline_is_known_to_the_replica(cluster: RunningCluster, client: Client) -> None:
    """As finish reason, or, where a busy machine sends it too late, in the replica's metrics."""

    def exceeded() -> float:
        outcome = grpc.StatusCode.DEADLINE_EXCEEDED.name
        return sum(cluster.metric("quill_requests_total", outcome=outcome))

    before = exceeded()
    try:
        reason: int = drain(client, max_new_tokens=4000, timeout_s=1.0, seed=1)[-1].finish_reason
    except CallError as error:
        reason = pb.FINISH_REASON_DEADLINE if error.code.name == "DEADLINE_EXCEEDED" else 0
        wait_until(lambda: exceeded() == before + 1, "the replica counts it", 10.0)
    assert reason == pb.FINISH_REASON_DEADLINE


def test_replica_notices_a_client_that_disconnects(cluster: RunningCluster, client: Client) -> None:
    def cancelled() -> float:
        return sum(cluster.metric("quill_requests_total", outcome="CANCELLED"))

    before = cancelled()
    chunks = client.stream(PROMPT, max_new_tokens=4000, seed=1, timeout_s=TIMEOUT_S)
    next(chunks)
    chunks.close()
    wait_until(lambda: cancelled() == before + 1, "the replica counts it", 10.0)


def test_calls_without_a_key_are_rejected(cluster: RunningCluster) -> None:
    with Client(cluster.address, NEVER) as client:
        assert status_of(client.model).code is grpc.StatusCode.UNAUTHENTICATED
        assert status_of(lambda: drain(client)).code is grpc.StatusCode.UNAUTHENTICATED


def test_health_needs_no_key_and_reflection_does(cluster: RunningCluster, keys: Keys) -> None:
    def services(metadata: Any) -> list[str]:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        ask = reflection_pb2.ServerReflectionRequest(list_services="")
        (reply,) = stub.ServerReflectionInfo(iter([ask]), metadata=metadata, timeout=TIMEOUT_S)
        return [each.name for each in reply.list_services_response.service]

    with grpc.insecure_channel(cluster.address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        reply = health.Check(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S)
        assert reply.status == health_pb2.HealthCheckResponse.SERVING
        assert "quill.v1.TextGeneration" in services(keys.access("alice").metadata)
        with pytest.raises(grpc.RpcError) as caught:
            services(())
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED


def test_kserve_answers(cluster: RunningCluster, keys: Keys) -> None:
    with grpc.insecure_channel(cluster.address) as channel:
        stub = kserve_grpc.GRPCInferenceServiceStub(channel)
        metadata = keys.access("alice").metadata
        reply = stub.ServerReady(kserve.ServerReadyRequest(), metadata=metadata, timeout=TIMEOUT_S)
    assert reply.ready


def test_unknown_methods_change_nothing(
    cluster: RunningCluster, client: Client, keys: Keys
) -> None:
    with grpc.insecure_channel(cluster.address) as channel:
        for name in ("\xff\xff", "Nothing"):
            ask: Any = channel.unary_unary(f"/quill.v1.TextGeneration/{name}")
            with pytest.raises(grpc.RpcError):
                ask(b"", timeout=10.0, metadata=keys.access("alice").metadata)
    for _ in range(4):
        assert client.model(timeout_s=TIMEOUT_S).name


def test_calls_of_a_key_are_counted_over_all_replicas(cluster: RunningCluster, keys: Keys) -> None:
    """Thirty a minute: a burst of five, and one more every two seconds."""
    began_s = time.monotonic()
    rejections: list[CallError] = []
    with Client(cluster.address, NEVER, access=keys.access("calls")) as client:
        for _ in range(20):
            try:
                client.model(timeout_s=TIMEOUT_S)
            except CallError as error:
                rejections.append(error)
    took_s = time.monotonic() - began_s
    assert 5 <= 20 - len(rejections) <= 5 + took_s / 2 + 1
    assert {error.code for error in rejections} == {grpc.StatusCode.RESOURCE_EXHAUSTED}
    assert all(error.retry_after_s is not None for error in rejections)


def test_concurrent_calls_are_counted_over_all_replicas(
    cluster: RunningCluster, keys: Keys
) -> None:
    with Client(cluster.address, NEVER, access=keys.access("two")) as client:
        held = [client.stream(PROMPT, max_new_tokens=4000, seed=seed) for seed in range(2)]
        for each in held:
            next(each)
        rejected = [status_of(client.model).code for _ in range(4)]
        assert set(rejected) == {grpc.StatusCode.RESOURCE_EXHAUSTED}
        for each in held:
            each.close()

        def is_free() -> bool:
            try:
                return bool(client.model(timeout_s=TIMEOUT_S).name)
            except CallError:
                return False

        wait_until(is_free, "closed calls are free again", 10.0)
        for _ in range(6):  # a call that has ended counts nowhere
            assert client.model(timeout_s=TIMEOUT_S).name


def test_tokens_of_a_key_are_counted_over_all_replicas(cluster: RunningCluster, keys: Keys) -> None:
    with Client(cluster.address, NEVER, access=keys.access("tokens")) as client:
        assert text_of(client, 1, num_tokens=200)
        rejected = [status_of(lambda: text_of(client, 2)) for _ in range(4)]
    assert {error.code for error in rejected} == {grpc.StatusCode.RESOURCE_EXHAUSTED}
    assert min(error.retry_after_s or 0.0 for error in rejected) > 3.0


def test_replica_that_stops_finishes_its_streams(
    cluster: RunningCluster, keys: Keys, texts: dict[int, str]
) -> None:
    """Streams that never end, such as health's Watch, delay nothing."""
    with (
        grpc.insecure_channel(cluster.address) as channel,
        calling_clients(cluster, keys.access("alice"), texts, 8),
    ):
        health = health_pb2_grpc.HealthStub(channel)
        watching = [health.Watch(health_pb2.HealthCheckRequest()) for _ in range(4)]
        assert all(next(each).status for each in watching)
        cluster.deploy(min_replicas=1, max_replicas=1)
        cluster.wait_for_replicas(1, LONGEST_ANSWER_S)


def rename(bundle: Path, name: str) -> None:
    file = bundle / "manifest.json"
    changed = file.with_suffix(".new")
    changed.write_text(json.dumps(json.loads(file.read_text()) | {"name": name}))
    changed.replace(file)


def reload(cluster: RunningCluster, keys: Keys, name: str) -> pb.ReloadResponse:
    with grpc.insecure_channel(cluster.address) as channel:
        call = pb_grpc.AdministrationStub(channel).Reload
        request, metadata = pb.ReloadRequest(), keys.access(name).metadata
        return call(request, metadata=metadata, timeout=TIMEOUT_S)


def names_of(client: Client) -> set[str]:
    return {client.model(timeout_s=TIMEOUT_S).name for _ in range(12)}


def test_reload_reaches_all_replicas_and_no_call_fails(
    cluster: RunningCluster, bundle: Path, keys: Keys, client: Client, texts: dict[int, str]
) -> None:
    with calling_clients(cluster, keys.access("alice"), texts, 4):
        rename(bundle, "reloaded")
        with pytest.raises(grpc.RpcError) as caught:
            reload(cluster, keys, "alice")
        assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED
        assert reload(cluster, keys, "admin").model.name == "reloaded"
        assert names_of(client) == {"reloaded"}


def test_command_reloads_all_replicas_and_no_call_fails(
    cluster: RunningCluster, bundle: Path, keys: Keys, client: Client, texts: dict[int, str]
) -> None:
    """On a machine of the cluster, without a key."""
    with calling_clients(cluster, keys.access("alice"), texts, 4):
        rename(bundle, "by command")
        command = [sys.executable, "-m", "quill", "cluster", "reload"]
        environment = {**os.environ, **cluster.environment}
        done = subprocess.run(
            command, capture_output=True, text=True, cwd=ROOT, env=environment, check=False
        )
        assert (done.stdout, done.stderr) == ("every replica has the bundle as it is now\n", "")
        assert names_of(client) == {"by command"}


def test_changed_options_bring_new_replicas_and_no_call_fails(
    cluster: RunningCluster, keys: Keys, texts: dict[int, str]
) -> None:
    before = {*cluster.replica_pids()}
    with calling_clients(cluster, keys.access("alice"), texts, 4):
        cluster.change_settings(max_queue=200)
        wait_until(lambda: not before & {*cluster.replica_pids()}, "all are new", 2 * START_S)


def test_rejected_bundle_changes_nothing(
    cluster: RunningCluster, bundle: Path, keys: Keys, client: Client
) -> None:
    file = bundle / "manifest.json"
    good, before = file.read_text(), names_of(client)
    file.write_text("{}")
    try:
        with pytest.raises(grpc.RpcError) as caught:
            reload(cluster, keys, "admin")
        assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert "format version" in str(caught.value.details())
    finally:
        file.write_text(good)
    assert names_of(client) == before


def test_killed_replica_loses_no_call_of_clients_that_resume(
    cluster: RunningCluster, keys: Keys, texts: dict[int, str]
) -> None:
    with calling_clients(cluster, keys.access("alice"), texts, 16, PATIENT):
        victim, other = cluster.replica_pids()
        os.kill(victim, signal.SIGKILL)
        wait_until(
            lambda: len({*cluster.replica_pids()} - {victim, other}) == 1, "another one", START_S
        )


def test_killed_coordinator_and_haproxy_come_back(
    cluster: RunningCluster, keys: Keys, client: Client, texts: dict[int, str]
) -> None:
    """Calls go on without the coordinator; only HAProxy's own end breaks streams."""
    (coordinator,) = cluster.pids("CoordinatorActor")
    with calling_clients(cluster, keys.access("alice"), texts, 4):
        os.kill(coordinator, signal.SIGKILL)
        wait_until(
            lambda: bool({*cluster.pids("CoordinatorActor")} - {coordinator}), "a new one", START_S
        )
    (haproxy,) = cluster.pids("haproxy.cfg")
    with calling_clients(cluster, keys.access("alice"), texts, 4, PATIENT):
        os.kill(haproxy, signal.SIGKILL)
        wait_until(lambda: bool({*cluster.pids("haproxy.cfg")} - {haproxy}), "a new one", START_S)
