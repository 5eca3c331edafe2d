"""--served-model-name: what clients may call the model, on every protocol."""

from collections.abc import Iterator

import grpc
import pytest

from quill.export.bundle.manifest import File
from quill.protos import kserve_pb2 as kserve
from quill.protos import kserve_pb2_grpc as kserve_grpc
from quill.server.client.sync_client import Client
from tests.server.http_client import HttpClient
from tests.server.running import Running, make_manifest, make_served, running_server

NAMES = ("gpt-4o", "mine")


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    with running_server(http_port=0, served=make_served(served_names=NAMES)) as running:
        yield running


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_http_answers_to_each_name_and_reports_the_first(running: Running, path: str) -> None:
    client = HttpClient(running.http_port)
    (model,) = client.get("/v1/models").json["data"]
    assert model["id"] == "gpt-4o"
    asked = {"max_tokens": 2, "prompt": "a"}
    if "chat" in path:
        asked = {"max_tokens": 2, "messages": [{"role": "user", "content": "a"}]}
    for name in (*NAMES, "quill"):
        answer = client.post(path, {"model": name} | asked).json
        assert answer["model"] == "gpt-4o"
        assert answer["system_fingerprint"] == make_served().fingerprint
        assert answer["system_fingerprint"] == client.get("/model").json["fingerprint"]
    reply = client.post(path, {"model": "reciter"} | asked)  # the bundle's own name is replaced
    assert reply.status == 404
    assert "there is gpt-4o, which mine, quill means, too" in reply.error["message"]


def test_fingerprint_is_of_the_files_that_are_served() -> None:
    def fingerprint(weights: str, others: str) -> str:
        served, *_ = make_served().graphs.file_names
        names = {"tokenizer.json": "t", served: weights, "decoder.other.onnx": others}
        files = tuple(File(name=name, size=1, sha256=each) for name, each in names.items())
        return make_served(manifest=make_manifest(files=files)).fingerprint

    assert fingerprint("a", "b") == fingerprint("a", "c") != fingerprint("b", "b")


def test_grpc_reports_the_first(running: Running) -> None:
    with Client(running.address) as client:
        assert client.model().name == "gpt-4o"


def test_kserve_answers_to_each_name(running: Running) -> None:
    with grpc.insecure_channel(running.address) as channel:
        stub = kserve_grpc.GRPCInferenceServiceStub(channel)
        ready = {
            name: stub.ModelReady(kserve.ModelReadyRequest(name=name)).ready
            for name in (*NAMES, "quill", "reciter")
        }
        found = stub.ModelStatistics(kserve.ModelStatisticsRequest())
    assert ready == {"gpt-4o": True, "mine": True, "quill": True, "reciter": False}
    assert [each.name for each in found.model_stats] == ["gpt-4o"]
