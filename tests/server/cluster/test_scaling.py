"""Replicas scale with the load, no call fails; replicas' spans are in callers' traces."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import grpc
import pytest

from quill.protos import generation_pb2 as pb
from quill.protos import generation_pb2_grpc as pb_grpc
from quill.server.settings import Settings
from tests.server.cluster.clients import PROMPT, TIMEOUT_S, calling_clients
from tests.server.cluster.conftest import Keys
from tests.server.cluster.running_cluster import RunningCluster, make_plan, running_cluster
from tests.server.telemetry.test_tracing import PARENT_ID, TRACE_ID, Collector, collecting

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with collecting() as collector:
        yield collector


@pytest.fixture(scope="module")
def scaling_cluster(
    bundle: Path,
    settings: Settings,
    collector: Collector,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[RunningCluster]:
    delays = {"upscale_delay_s": 1.0, "downscale_delay_s": 2.0}
    traced = replace(settings, tracing=True)
    plan = make_plan(bundle, traced, min_replicas=1, max_replicas=3, **delays)
    with running_cluster(plan, tmp_path_factory.mktemp("ray")) as running:
        yield running


def test_call_is_in_its_callers_trace(
    scaling_cluster: RunningCluster, keys: Keys, collector: Collector
) -> None:
    traceparent = ("traceparent", f"00-{TRACE_ID}-{PARENT_ID}-01")
    metadata = (*keys.access("alice").metadata, traceparent)
    request = pb.GenerateRequest(prompt=PROMPT, max_new_tokens=3)
    with grpc.insecure_channel(scaling_cluster.address) as channel:
        stub = pb_grpc.TextGenerationStub(channel)
        stub.Generate(request, metadata=metadata, timeout=TIMEOUT_S)
    span = None
    while span is None or span.name != "quill/Generate":
        _, span = collector.spans.get(timeout=TIMEOUT_S)
    assert (span.trace_id.hex(), span.parent_span_id.hex()) == (TRACE_ID, PARENT_ID)


def test_replicas_follow_the_load(
    scaling_cluster: RunningCluster, keys: Keys, texts: dict[int, str]
) -> None:
    with calling_clients(scaling_cluster, keys.access("alice"), texts, 12):
        scaling_cluster.wait_for_replicas(3)
    with calling_clients(scaling_cluster, keys.access("alice"), texts, 1):
        scaling_cluster.wait_for_replicas(1)
