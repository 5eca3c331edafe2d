"""A small client for people who import it.

Knows: calls, waiting. Does not know: terminals, which of several servers is asked
(server/client/fleet.py). What both clients share is in server/client/requests.py.

    with Client("127.0.0.1:50051") as client:  # or "quill://10.0.0.1:50051,10.0.0.2:50051"
        for chunk in client.stream("Once upon a time", max_new_tokens=50):
            print(chunk.text, end="", flush=True)
"""

import time
from collections.abc import Callable, Generator, Sequence
from typing import Any, TypeVar, Unpack

import grpc

from quill.protos import generation_pb2 as pb
from quill.protos import generation_pb2_grpc as pb_grpc
from quill.server.client.access import Access
from quill.server.client.balancing.balancer import ServerState
from quill.server.client.balancing.beginning import beginning
from quill.server.client.call_error import CallError, read_error
from quill.server.client.fleet import Fleet
from quill.server.client.fleet_state import Lease, closed
from quill.server.client.requests import (
    EmbedOptions,
    Options,
    Prompt,
    Texts,
    embed_request,
    fill_request,
    make_request,
    only,
    score_request,
    seeded,
)
from quill.server.client.resume import ResumeFilter
from quill.server.client.retry import Attempts, Retries
from quill.server.client.trace_context import trace_metadata
from quill.server.prefix_header import write_prefix_hash

_Request = TypeVar("_Request")
_Result = TypeVar("_Result")


class Client:
    """Blocking calls. Safe to use from several threads. Errors are CallErrors."""

    def __init__(
        self,
        address: str,
        retries: Retries | None = None,
        sleep: Callable[[float], None] = time.sleep,
        access: Access | None = None,
    ) -> None:
        self._access = access or Access()
        self._fleet = Fleet(address, self._access)
        self._retries = retries or Retries()
        self._sleep = sleep

    @property
    def _metadata(self) -> tuple[tuple[str, str], ...]:
        """Who calls, and within which trace."""
        return self._access.metadata + trace_metadata()

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._fleet.close()

    def servers(self) -> tuple[ServerState, ...]:
        """Those behind the address, and what this client has asked of each."""
        return self._fleet.servers()

    def generate(
        self, prompt: Prompt, *, timeout_s: float | None = None, **options: Unpack[Options]
    ) -> pb.GenerateResponse:
        """The whole answer, at once."""
        request = seeded(make_request(prompt, options))
        key = beginning(request)

        def call(server: Lease, left_s: float | None) -> pb.GenerateResponse:
            headers = self._metadata + server.headers + write_prefix_hash(key)
            answers = server.stub.Generate(request, timeout=left_s, metadata=headers)
            try:
                server.hear(answers.initial_metadata())
                answer: pb.GenerateResponse = only(list(answers))
            finally:
                answers.cancel()
            server.end()
            server.hear(answers.trailing_metadata())
            return answer

        return self._try(call, key, timeout_s, set())

    def stream(
        self,
        prompt: Prompt,
        *,
        timeout_s: float | None = None,
        resume: bool = False,
        **options: Unpack[Options],
    ) -> Generator[pb.GenerateChunk, None, None]:
        """The answer as it is made. Closing the iterator ends the request on the server.

        With `resume`, a stream that breaks is asked for again with the same seed, and goes on
        where it broke, if the server comes back within the retries.
        """
        request = seeded(make_request(prompt, options))
        return (self._resumed if resume else self._stream)(request, timeout_s)

    def _resumed(
        self, request: pb.GenerateRequest, timeout_s: float | None
    ) -> Generator[pb.GenerateChunk, None, None]:
        attempts, given = Attempts(self._retries, timeout_s), ResumeFilter()
        failed: set[str] = set()
        while True:
            began = False
            try:
                for chunk in self._stream(request, attempts.left_s, failed):
                    began, new = True, given.take(chunk)
                    if new is not None:
                        yield new
                return
            except CallError as error:
                # Before its first chunk a call has been tried often enough.
                elsewhere = self._fleet.has_other(failed)
                delay_s = attempts.delay_s(error, warn=False, elsewhere=elsewhere)
                if not began or delay_s is None:
                    raise
            given.replay()

    def _stream(
        self,
        request: pb.GenerateRequest,
        timeout_s: float | None,
        failed: set[str] | None = None,
    ) -> Generator[pb.GenerateChunk, None, None]:
        """`failed`: servers that broke it before; this one joins them if it does."""
        failed, key = set() if failed is None else failed, beginning(request)

        def begin(server: Lease, left_s: float | None) -> _Begun:
            headers = self._metadata + server.headers + write_prefix_hash(key)
            call = server.stub.GenerateStream(request, timeout=left_s, metadata=headers)
            try:
                server.hear(call.initial_metadata())
                return server, call, next(call, None)
            except BaseException:
                call.cancel()
                raise

        server, call, chunk = self._try(begin, key, timeout_s, failed)
        try:
            while chunk is not None:
                yield chunk
                chunk = next(call, None)
            server.end()
            server.hear(call.trailing_metadata())
        except grpc.RpcError as raised:
            failed.add(server.address)
            error = self._read(raised)
            server.end(error)
            raise error from raised
        finally:
            server.end()
            call.cancel()

    def score(
        self, text: str | Sequence[int], *, timeout_s: float | None = None
    ) -> pb.ScoreResponse:
        """How likely the model finds a text."""
        return self._call(lambda stub: stub.Score, score_request(text), timeout_s)

    def embed(
        self, inputs: Texts, *, timeout_s: float | None = None, **options: Unpack[EmbedOptions]
    ) -> pb.EmbedResponse:
        """A vector for each text, in `embeddings`."""
        return self._call(lambda stub: stub.Embed, embed_request(inputs, options), timeout_s)

    def fill_mask(
        self,
        text: str | Sequence[int],
        *,
        top_k: int | None = None,
        timeout_s: float | None = None,
    ) -> pb.FillMaskResponse:
        """What could stand where a text has the mask token."""
        return self._call(lambda stub: stub.FillMask, fill_request(text, top_k), timeout_s)

    def tokenize(self, text: str, *, timeout_s: float | None = None) -> list[int]:
        request = pb.TokenizeRequest(text=text)
        return list(self._call(lambda stub: stub.Tokenize, request, timeout_s).token_ids)

    def detokenize(self, token_ids: Sequence[int], *, timeout_s: float | None = None) -> str:
        request = pb.DetokenizeRequest(token_ids=token_ids)
        return self._call(lambda stub: stub.Detokenize, request, timeout_s).text

    def model(self, *, timeout_s: float | None = None) -> pb.Model:
        return self._call(lambda stub: stub.GetModel, pb.GetModelRequest(), timeout_s)

    def _call(
        self,
        method: "Callable[[_Stub], grpc.UnaryUnaryMultiCallable[_Request, _Result]]",
        request: _Request,
        timeout_s: float | None,
    ) -> _Result:
        def call(server: Lease, left_s: float | None) -> _Result:
            answer = method(server.stub)(request, timeout=left_s, metadata=self._metadata)
            server.end()
            return answer

        return self._try(call, None, timeout_s, set())

    def _try(
        self,
        call: Callable[[Lease, float | None], _Result],
        key: bytes | None,
        timeout_s: float | None,
        failed: set[str],
    ) -> _Result:
        """Until it succeeds, or there is no use in trying again. `failed`: servers to avoid."""
        attempts = Attempts(self._retries, timeout_s)
        while True:
            try:
                return self._ask(call, key, attempts, failed)
            except CallError as error:
                elsewhere = self._fleet.has_other(failed)
                delay_s = attempts.delay_s(error, elsewhere=elsewhere)
                if delay_s is None:
                    raise
            self._sleep(delay_s)

    def _ask(
        self,
        call: Callable[[Lease, float | None], _Result],
        key: bytes | None,
        attempts: Attempts,
        failed: set[str],
    ) -> _Result:
        server = self._fleet.take(key, failed, attempts.left_s)
        try:
            return call(server, attempts.left_s)
        except grpc.RpcError as raised:
            failed.add(server.address)
            error = self._read(raised)
            server.end(error)
            raise error from raised
        except BaseException:
            server.end()
            raise

    def _read(self, error: grpc.RpcError) -> CallError:
        if self._fleet.is_closed:  # in another thread
            return closed()
        return read_error(error, self._access)


# Multicallables are generic for type checkers alone, hence the quotes around them.
_Stub = pb_grpc.TextGenerationStub
_Begun = tuple[Lease, Any, pb.GenerateChunk | None]
