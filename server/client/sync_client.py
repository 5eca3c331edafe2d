# Generated from async_client.py by server/client/generate.py: don't edit.
"""The blocking client: `from quill.client import Client`.

Knows: calls, retries. Does not know: terminals, which of several servers gets a call.

    with Client("127.0.0.1:50051") as client:  # or "quill://10.0.0.1:1,10.0.0.2:1"
        for chunk in client.stream("Once upon a time", max_new_tokens=50):
            print(chunk.text, end="", flush=True)
"""

import time
import contextlib
from collections.abc import Callable, Generator, Sequence
from typing import Any, TypeVar, Unpack

from google.protobuf.message import Message

from quill.protos import generation_pb2 as pb
from quill.server.balancing_headers import prefix_key, write_prefix_hash
from quill.server.client.access import Access, Metadata
from quill.server.client.sync_pool import EndpointPool
from quill.server.client.balancer import ServerState
from quill.server.client.errors import CallError
from quill.server.client.options import EmbedOptions
from quill.server.client.pool_state import PickedEndpoint
from quill.server.client.primitives import CALL_ERRORS, read
from quill.server.client.requests import (
    Options,
    Prompt,
    Texts,
    embed_request,
    fill_request,
    make_request,
    only,
    score_request,
    trace_metadata,
    with_seed,
)
from quill.server.client.retry import Attempts, ResumeFilter, Retries

_Result = TypeVar("_Result")
_Started = tuple[PickedEndpoint, Any, pb.GenerateChunk | None]


class Client:
    """Safe to use from several threads. Errors are CallErrors."""

    def __init__(
        self,
        address: str,
        retries: Retries | None = None,
        sleep: Callable[[float], None] = time.sleep,
        access: Access | None = None,
    ) -> None:
        self._access = access or Access()
        self._pool = EndpointPool(address, self._access)
        self._retries = retries or Retries()
        self._sleep = sleep

    @property
    def _metadata(self) -> Metadata:
        return self._access.metadata + trace_metadata()

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Cancels the calls that are running."""
        self._pool.close()

    def servers(self) -> tuple[ServerState, ...]:
        """The servers behind the address, and how many calls this client made to each."""
        return self._pool.servers()

    def generate(
        self, prompt: Prompt, *, timeout_s: float | None = None, **options: Unpack[Options]
    ) -> pb.GenerateResponse:
        """The whole response at once."""
        return self.generate_request(make_request(prompt, options), timeout_s)

    def generate_request(
        self, request: pb.GenerateRequest, timeout_s: float | None = None
    ) -> pb.GenerateResponse:
        """Sets the request's seed if it has none."""
        with_seed(request)
        key = prefix_key(request)

        def call(endpoint: PickedEndpoint, left_s: float | None) -> pb.GenerateResponse:
            headers = self._metadata + endpoint.headers + write_prefix_hash(key)
            responses = endpoint.stub.Generate(request, timeout=left_s, metadata=headers)
            try:
                endpoint.read_load(responses.initial_metadata())
                response: pb.GenerateResponse = only([each for each in responses])
            finally:
                responses.cancel()
            endpoint.end()
            endpoint.read_load(responses.trailing_metadata())
            return response

        return self._retry(call, key, Attempts(self._retries, timeout_s), set())

    def stream(
        self,
        prompt: Prompt,
        *,
        timeout_s: float | None = None,
        resume: bool = False,
        **options: Unpack[Options],
    ) -> Generator[pb.GenerateChunk, None, None]:
        """The response as it is generated. Closing the iterator cancels the request on the server.

        With `resume`, a stream that breaks is requested again with the same seed, here or from
        another server, and continues after the tokens that were received.
        """
        return self.stream_request(make_request(prompt, options), timeout_s, resume)

    def stream_request(
        self, request: pb.GenerateRequest, timeout_s: float | None = None, resume: bool = False
    ) -> Generator[pb.GenerateChunk, None, None]:
        """Sets the request's seed if it has none."""
        with_seed(request)
        attempts, received = Attempts(self._retries, timeout_s), ResumeFilter()
        failed: set[str] = set()
        while True:
            try:
                stream = self._stream_once(request, attempts, failed)
                with contextlib.closing(stream) as chunks:
                    for chunk in chunks:
                        new = received.filter(chunk) if resume else chunk
                        if new is not None:
                            attempts.note_progress()
                            yield new
                return
            except CallError as error:
                if not resume:
                    raise
                self._wait(error, attempts, failed)
            received.restart()

    def _stream_once(
        self, request: pb.GenerateRequest, attempts: Attempts, failed: set[str]
    ) -> Generator[pb.GenerateChunk, None, None]:
        """`failed`: servers on which the stream broke before. This one joins them if it breaks."""
        key = prefix_key(request)

        def start(endpoint: PickedEndpoint, left_s: float | None) -> _Started:
            headers = self._metadata + endpoint.headers + write_prefix_hash(key)
            call = endpoint.stub.GenerateStream(request, timeout=left_s, metadata=headers)
            try:
                endpoint.read_load(call.initial_metadata())
                return endpoint, call, read(call)
            except BaseException:
                call.cancel()
                raise

        endpoint, call, chunk = self._retry(start, key, attempts, failed)
        try:
            while chunk is not None:
                yield chunk
                chunk = read(call)
            endpoint.end()
            endpoint.read_load(call.trailing_metadata())
        except CALL_ERRORS as raised:
            failed.add(endpoint.address)
            raise endpoint.fail(raised) from raised
        finally:
            endpoint.end()
            call.cancel()

    def score(
        self, text: str | Sequence[int], *, timeout_s: float | None = None
    ) -> pb.ScoreResponse:
        """The log probability of each token of a text."""
        response: pb.ScoreResponse = self._call("Score", score_request(text), timeout_s)
        return response

    def embed(
        self, inputs: Texts, *, timeout_s: float | None = None, **options: Unpack[EmbedOptions]
    ) -> pb.EmbedResponse:
        """An embedding for each text, in `embeddings`."""
        return self.embed_request(embed_request(inputs, options), timeout_s)

    def embed_request(
        self, request: pb.EmbedRequest, timeout_s: float | None = None
    ) -> pb.EmbedResponse:
        response: pb.EmbedResponse = self._call("Embed", request, timeout_s)
        return response

    def fill_mask(
        self,
        text: str | Sequence[int],
        *,
        top_k: int | None = None,
        timeout_s: float | None = None,
    ) -> pb.FillMaskResponse:
        """The most likely tokens for each mask token of a text."""
        request = fill_request(text, top_k)
        response: pb.FillMaskResponse = self._call("FillMask", request, timeout_s)
        return response

    def tokenize(self, text: str, *, timeout_s: float | None = None) -> list[int]:
        response = self._call("Tokenize", pb.TokenizeRequest(text=text), timeout_s)
        return list(response.token_ids)

    def detokenize(self, token_ids: Sequence[int], *, timeout_s: float | None = None) -> str:
        request = pb.DetokenizeRequest(token_ids=token_ids)
        response: pb.DetokenizeResponse = self._call("Detokenize", request, timeout_s)
        return response.text

    def model(self, *, timeout_s: float | None = None) -> pb.Model:
        model: pb.Model = self._call("GetModel", pb.GetModelRequest(), timeout_s)
        return model

    def _call(self, method: str, request: Message, timeout_s: float | None) -> Any:
        def call(endpoint: PickedEndpoint, left_s: float | None) -> Any:
            method_of_stub = getattr(endpoint.stub, method)
            response = method_of_stub(request, timeout=left_s, metadata=self._metadata)
            endpoint.end()
            return response

        return self._retry(call, None, Attempts(self._retries, timeout_s), set())

    def _retry(
        self,
        call: Callable[[PickedEndpoint, float | None], _Result],
        key: bytes | None,
        attempts: Attempts,
        failed: set[str],
    ) -> _Result:
        """Calls until it succeeds or a retry is of no use. `failed`: servers to avoid."""
        while True:
            try:
                return self._attempt(call, key, attempts, failed)
            except CallError as error:
                self._wait(error, attempts, failed)

    def _attempt(
        self,
        call: Callable[[PickedEndpoint, float | None], _Result],
        key: bytes | None,
        attempts: Attempts,
        failed: set[str],
    ) -> _Result:
        endpoint = self._pool.pick(key, failed, attempts.left_s)
        try:
            result = call(endpoint, attempts.left_s)
        except CALL_ERRORS as raised:
            failed.add(endpoint.address)
            raise endpoint.fail(raised) from raised
        except BaseException:
            endpoint.end()
            raise
        self._pool.was_reached = True
        return result

    def _wait(self, error: CallError, attempts: Attempts, failed: set[str]) -> None:
        """For the next attempt. Raises the error if there is none."""
        delay_s = attempts.delay_s(
            error, has_other=self._pool.has_other(failed), was_reached=self._pool.was_reached
        )
        if delay_s is None:
            raise error
        self._sleep(delay_s)
