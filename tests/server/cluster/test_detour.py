"""Calls that come by Ray's own proxy are answered by the replica's own server."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from quill.protos import generation_pb2 as pb
from quill.protos import generation_pb2_grpc as pb_grpc
from quill.server.cluster.replica.detour import Detour, detouring_methods
from quill.server.errors import RequestError
from tests.server.cluster.test_keeper import in_a_loop

KEY = ("authorization", "Bearer secret")
METHODS = detouring_methods()


class Context:
    """As Ray hands one to a deployment."""

    def __init__(self, peer: str = "ipv4:127.0.0.1:4711") -> None:
        self._peer = peer
        self.code: grpc.StatusCode | None = None
        self.details = ""

    def peer(self) -> str:
        return self._peer

    def invocation_metadata(self) -> list[tuple[str, str]]:
        return [KEY, ("user-agent", "grpc-python"), ("grpc-accept-encoding", "gzip")]

    def set_code(self, code: grpc.StatusCode) -> None:
        self.code = code

    def set_details(self, details: str) -> None:
        self.details = details


class Own(pb_grpc.TextGenerationServicer):
    """Says what it was given; refuses callers that ask for nothing."""

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> pb.GenerateResponse:
        assert KEY in context.invocation_metadata()
        if not request.prompt:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "prompt is missing")
        return pb.GenerateResponse(sequences=[pb.Sequence(text=request.prompt)])

    async def GenerateStream(
        self, request: pb.GenerateRequest, context: Any
    ) -> AsyncIterator[pb.GenerateChunk]:
        for letter in request.prompt:
            yield pb.GenerateChunk(text=letter)
        await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "that is all")


@asynccontextmanager
async def replica() -> AsyncIterator[Any]:
    server = grpc.aio.server()
    pb_grpc.add_TextGenerationServicer_to_server(Own(), server)  # type: ignore[abstract]
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    detour = Detour(loopback_only=True)
    detour.open(f"127.0.0.1:{port}")
    yield SimpleNamespace(detour=detour)
    await detour.close()
    await server.stop(None)


@in_a_loop
async def test_call_is_answered_with_its_callers_own_metadata() -> None:
    async with replica() as own:
        reply = await METHODS["Generate"](own, pb.GenerateRequest(prompt="abc"), Context())
        assert reply.sequences[0].text == "abc"


def test_key_goes_by_no_proxy_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Machines have one where bundles are fetched through it."""
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    test_call_is_answered_with_its_callers_own_metadata()


@in_a_loop
async def test_status_of_the_own_server_is_kept() -> None:
    async with replica() as own:
        context = Context()
        with pytest.raises(RequestError, match="prompt is missing"):
            await METHODS["Generate"](own, pb.GenerateRequest(), context)
        assert context.code is grpc.StatusCode.INVALID_ARGUMENT


@in_a_loop
async def test_stream_comes_piece_by_piece_to_its_end() -> None:
    async with replica() as own:
        context = Context()
        chunks = METHODS["GenerateStream"](own, pb.GenerateRequest(prompt="abc"), context)
        assert [(await anext(chunks)).text for _ in range(3)] == ["a", "b", "c"]
        with pytest.raises(RequestError, match="that is all"):
            await anext(chunks)
        assert context.code is grpc.StatusCode.RESOURCE_EXHAUSTED


@in_a_loop
async def test_nobody_comes_in_from_other_machines_where_replicas_are_for_their_own() -> None:
    async with replica() as own:
        for peer in ("ipv4:192.0.2.7:4711", "ipv6:%5B2001:db8::7%5D:4711", "unknown", ""):
            context = Context(peer)
            with pytest.raises(RequestError, match="Try again"):
                await METHODS["Generate"](own, pb.GenerateRequest(prompt="abc"), context)
            assert context.code is grpc.StatusCode.UNAVAILABLE
        here = Context("ipv6:%5B::1%5D:4711")
        assert await METHODS["Generate"](own, pb.GenerateRequest(prompt="abc"), here)


@pytest.mark.parametrize("name", ["Generate", "GenerateStream", "ModelStreamInfer"])
def test_replica_that_does_not_listen_yet_says_so(name: str) -> None:
    @in_a_loop
    async def ask() -> None:
        context, nowhere = Context(), SimpleNamespace(detour=Detour(loopback_only=False))
        asked = METHODS[name](nowhere, pb.GenerateRequest(), context)
        with pytest.raises(RequestError, match="Try again"):
            await (asked if name == "Generate" else anext(asked))
        assert context.code is grpc.StatusCode.UNAVAILABLE

    ask()
