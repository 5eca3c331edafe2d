"""What every door offers: the calls of generation.proto, without gRPC.

Knows: which model serves, who is accounted for. Does not know: doors.

A door makes an Origin of whatever it knows of a call, and turns RequestErrors into its own words.
One that answers several requests in one call, as a batch of prompts is, opens the call itself.
"""

from collections.abc import AsyncIterator

from quill.protos import generation_pb2 as pb
from quill.server.engine.dispatcher import Dispatcher
from quill.server.errors import UnavailableError
from quill.server.loading.reload import Reloader
from quill.server.service.call import Call, Send
from quill.server.service.calls import Calls, raising_context
from quill.server.service.origin import Origin


class Service:
    """All coroutines raise RequestErrors, and let a cancellation through."""

    def __init__(
        self, dispatcher: Dispatcher, reloader: Reloader, calls: Calls, share_cache: bool
    ) -> None:
        self._dispatcher = dispatcher
        self._reloader = reloader
        self._share_cache = share_cache
        self.calls = calls

    @property
    def num_requests(self) -> int:
        """Running and waiting, of all doors."""
        return len(self._dispatcher)

    @raising_context
    async def call(self, origin: Origin) -> AsyncIterator[Call]:
        async with self.calls.call(origin) as record:
            if self._reloader.instance is None:
                raise UnavailableError(
                    "the server is loading its model. Try again in a few seconds"
                )
            with self._reloader.instance.call() as instance:
                limits = self.calls.limits
                yield Call(origin, record, instance, self._dispatcher, limits, self._share_cache)

    async def generate(self, message: pb.GenerateRequest, origin: Origin) -> pb.GenerateResponse:
        async with self.call(origin) as call:
            return await call.generate(await call.read(message))

    async def generate_stream(
        self, message: pb.GenerateRequest, origin: Origin, send: Send
    ) -> None:
        async with self.call(origin) as call:
            await call.generate_stream(await call.read(message), send)

    async def score(self, message: pb.ScoreRequest, origin: Origin) -> pb.ScoreResponse:
        async with self.call(origin) as call:
            return await call.score(message)

    async def embed(self, message: pb.EmbedRequest, origin: Origin) -> pb.EmbedResponse:
        async with self.call(origin) as call:
            return await call.embed(message)

    async def fill_mask(self, message: pb.FillMaskRequest, origin: Origin) -> pb.FillMaskResponse:
        async with self.call(origin) as call:
            return await call.fill_mask(message)

    async def tokenize(self, message: pb.TokenizeRequest, origin: Origin) -> pb.TokenizeResponse:
        async with self.call(origin) as call:
            return await call.tokenize(message)

    async def detokenize(
        self, message: pb.DetokenizeRequest, origin: Origin
    ) -> pb.DetokenizeResponse:
        async with self.call(origin) as call:
            return await call.detokenize(message)

    async def get_model(self, origin: Origin) -> pb.Model:
        async with self.call(origin) as call:
            return call.get_model()
