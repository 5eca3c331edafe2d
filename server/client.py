"""A small client for people who import it.

Knows: channels, waiting. Does not know: terminals. What both clients share is in server/asking.py.

    with Client("127.0.0.1:50051") as client:
        for chunk in client.stream("Once upon a time", max_new_tokens=50):
            print(chunk.text, end="", flush=True)
"""

import itertools
import time
from collections.abc import Callable, Generator, Sequence
from typing import Any, TypeVar, Unpack

import grpc

from protos import generation_pb2 as pb
from protos import generation_pb2_grpc as pb_grpc
from server.access import Access
from server.asking import (
    CHANNEL_OPTIONS,
    CallError,
    Options,
    Prompt,
    Retries,
    make_request,
    read_error,
    seeded,
)
from server.resuming import Given

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
        self._metadata = self._access.metadata
        self._stub = pb_grpc.TextGenerationStub(self._channel)
        self._retries = retries or Retries()
        self._sleep = sleep

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
        request = make_request(prompt, options)
        return self._try(
            lambda left_s: self._stub.Generate(request, timeout=left_s, metadata=self._metadata),
            timeout_s,
        )

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
        end_s = None if timeout_s is None else time.monotonic() + timeout_s
        given = Given()
        for num_broken in itertools.count():
            began = False
            try:
                for chunk in self._stream(request, left(end_s)):
                    began, new = True, given.take(chunk)
                    if new is not None:
                        yield new
                return
            except CallError as error:
                # Before its first chunk a call has been tried often enough.
                if not began or self._retries.delay_s(error, num_broken, left(end_s)) is None:
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
        request = score_request(text)
        return self._try(
            lambda left_s: self._stub.Score(request, timeout=left_s, metadata=self._metadata),
            timeout_s,
        )

    def tokenize(self, text: str, *, timeout_s: float | None = None) -> list[int]:
        request = pb.TokenizeRequest(text=text)
        reply = self._try(
            lambda left_s: self._stub.Tokenize(request, timeout=left_s, metadata=self._metadata),
            timeout_s,
        )
        return list(reply.token_ids)

    def detokenize(self, token_ids: Sequence[int], *, timeout_s: float | None = None) -> str:
        request = pb.DetokenizeRequest(token_ids=token_ids)
        reply = self._try(
            lambda left_s: self._stub.Detokenize(request, timeout=left_s, metadata=self._metadata),
            timeout_s,
        )
        return reply.text

    def model(self, *, timeout_s: float | None = None) -> pb.Model:
        request = pb.GetModelRequest()
        return self._try(
            lambda left_s: self._stub.GetModel(request, timeout=left_s, metadata=self._metadata),
            timeout_s,
        )

    def _try(self, call: Callable[[float | None], _Result], timeout_s: float | None) -> _Result:
        """Until it succeeds, or there is no use in trying again."""
        end_s = None if timeout_s is None else time.monotonic() + timeout_s
        num_tried = 0
        while True:
            try:
                return call(left(end_s))
            except grpc.RpcError as raised:
                error = read_error(raised, self._access)
                delay_s = self._retries.delay_s(error, num_tried, left(end_s))
                if delay_s is None:
                    raise error from raised
            if num_tried == 0:
                self._retries.tell(error, delay_s)
            num_tried += 1
            self._sleep(delay_s)


def open_channel(address: str, access: Access) -> grpc.Channel:
    return access.channel(address, CHANNEL_OPTIONS)


def score_request(text: str | Sequence[int]) -> pb.ScoreRequest:
    if isinstance(text, str):
        return pb.ScoreRequest(text=text)
    return pb.ScoreRequest(token_ids=pb.TokenIds(ids=text))


def left(end_s: float | None) -> float | None:
    return None if end_s is None else max(0.0, end_s - time.monotonic())
