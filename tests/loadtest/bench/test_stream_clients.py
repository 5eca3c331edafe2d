"""Streams that run side by side, on a real server."""

import asyncio
import time

import grpc

from quill.loadtest.bench.stream_clients import StreamClients
from quill.loadtest.environment.own_server import OwnServer

PROMPT = [1, 2, 3, 4]
GREEDY = {"temperature": 0.0}


def test_every_stream_of_a_crowd_gets_its_tokens(server: OwnServer) -> None:
    async def main() -> None:
        begin_s = time.perf_counter()
        async with (
            grpc.aio.insecure_channel(server.address) as channel,
            StreamClients(channel, PROMPT, 3, GREEDY, 100) as crowd,
        ):
            rate = await crowd.rate(10)
            gaps = crowd.gaps(begin_s, time.perf_counter())
            assert rate > 0
            assert len(gaps) >= 3 * 9  # the watched stream's ten tokens, about as many of others
            assert crowd.gaps(begin_s - 2, begin_s - 1) == []
            await crowd.first_token(PROMPT)

    asyncio.run(main())


def test_request_joins_the_crowd_in_the_place_of_one_that_left(server: OwnServer) -> None:
    async def main() -> None:
        async with (
            grpc.aio.insecure_channel(server.address) as channel,
            StreamClients(channel, PROMPT, 4, GREEDY, 100) as crowd,
        ):
            asked_s = time.perf_counter()
            waiting = asyncio.create_task(crowd.started(PROMPT))
            crowd.cancel_one()
            assert asked_s <= await waiting <= time.perf_counter()

    asyncio.run(main())
