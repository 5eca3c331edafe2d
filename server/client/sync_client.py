"""A small client for people who import it.

Knows: channels, waiting. Does not know: terminals. What both clients share is in
server/client/requests.py.

    with Client("127.0.0.1:50051") as client:
        for chunk in client.stream("Once upon a time", max_new_tokens=50):
            print(chunk.text, end="", flush=True)
"""

import time
from collections.abc import Callable, Generator, Sequence
from typing import Any, TypeVar, Unpack

import grpc

from quill.protos import generation_pb2 as pb
from quill.protos import generation_pb2_grpc as pb_grpc
from quill.server.client.access import Access, open_channel
from quill.server.client.call_error import CallError, read_error
from quill.server.client.requests import (
    EmbedOptions,
    Options,
    Prompt,
    Texts,
    embed_request,
    fill_request,
    make_request,
    score_request,
    seeded,
)
from quill.server.client.resume import ResumeFilter
from quill.server.client.retry import Attempts, Retries
from quill.server.client.trace_context import trace_metadata

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
        self._channel = open_channel(address, self._access)
        self._stub = pb_grpc.TextGenerationStub(self._channel)
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
        self._channel.close()

    def generate(
        self, prompt: Prompt, *, timeout_s: float | None = None, **options: Unpack[Options]
    ) -> pb.GenerateResponse:
        """The whole answer, at once."""
        return self._call(self._stub.Generate, make_request(prompt, options), timeout_s)

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
        request = make_request(prompt, options)
        if not resume:
            return self._stream(request, timeout_s)
        return self._resumed(seeded(request), timeout_s)

    def _resumed(
        self, request: pb.GenerateRequest, timeout_s: float | None
    ) -> Generator[pb.GenerateChunk, None, None]:
        attempts, given = Attempts(self._retries, timeout_s), ResumeFilter()
        while True:
            began = False
            try:
                for chunk in self._stream(request, attempts.left_s):
                    began, new = True, given.take(chunk)
                    if new is not None:
                        yield new
                return
            except CallError as error:
                # Before its first chunk a call has been tried often enough.
                if not began or attempts.delay_s(error, warn=False) is None:
                    raise
            given.replay()

    def _stream(
        self, request: pb.GenerateRequest, timeout_s: float | None
    ) -> Generator[pb.GenerateChunk, None, None]:
        def begin(left_s: float | None) -> tuple[Any, pb.GenerateChunk | None]:
            call = self._stub.GenerateStream(request, timeout=left_s, metadata=self._metadata)
            return call, next(call, None)

        call, chunk = self._try(begin, timeout_s)
        try:
            while chunk is not None:
                yield chunk
                chunk = next(call, None)
        except grpc.RpcError as error:
            raise read_error(error, self._access) from error
        finally:
            call.cancel()

    def score(
        self, text: str | Sequence[int], *, timeout_s: float | None = None
    ) -> pb.ScoreResponse:
        """How likely the model finds a text."""
        return self._call(self._stub.Score, score_request(text), timeout_s)

    def embed(
        self, inputs: Texts, *, timeout_s: float | None = None, **options: Unpack[EmbedOptions]
    ) -> pb.EmbedResponse:
        """A vector for each text, in `embeddings`."""
        return self._call(self._stub.Embed, embed_request(inputs, options), timeout_s)

    def fill_mask(
        self,
        text: str | Sequence[int],
        *,
        top_k: int | None = None,
        timeout_s: float | None = None,
    ) -> pb.FillMaskResponse:
        """What could stand where a text has the mask token."""
        return self._call(self._stub.FillMask, fill_request(text, top_k), timeout_s)

    def tokenize(self, text: str, *, timeout_s: float | None = None) -> list[int]:
        request = pb.TokenizeRequest(text=text)
        return list(self._call(self._stub.Tokenize, request, timeout_s).token_ids)

    def detokenize(self, token_ids: Sequence[int], *, timeout_s: float | None = None) -> str:
        request = pb.DetokenizeRequest(token_ids=token_ids)
        return self._call(self._stub.Detokenize, request, timeout_s).text

    def model(self, *, timeout_s: float | None = None) -> pb.Model:
        return self._call(self._stub.GetModel, pb.GetModelRequest(), timeout_s)

    def _call(
        self,
        method: "grpc.UnaryUnaryMultiCallable[_Request, _Result]",  # generic in its stub alone
        request: _Request,
        timeout_s: float | None,
    ) -> _Result:
        return self._try(
            lambda left_s: method(request, timeout=left_s, metadata=self._metadata), timeout_s
        )

    def _try(self, call: Callable[[float | None], _Result], timeout_s: float | None) -> _Result:
        """Until it succeeds, or there is no use in trying again."""
        attempts = Attempts(self._retries, timeout_s)
        while True:
            try:
                return call(attempts.left_s)
            except grpc.RpcError as raised:
                error = read_error(raised, self._access)
                delay_s = attempts.delay_s(error)
                if delay_s is None:
                    raise error from raised
            self._sleep(delay_s)
