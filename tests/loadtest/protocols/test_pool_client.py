"""Several servers as a load test asks them."""

from contextlib import closing

import pytest

from quill.loadtest.environment.server import StartedServer
from quill.loadtest.protocols.connect import PoolClient, connect
from quill.loadtest.protocols.grpc import CallError
from quill.protos import generation_pb2 as pb
from quill.server.client.access import Access

REQUEST = pb.GenerateRequest(
    prompt_ids=pb.TokenIds(ids=[5, 6, 7]), max_new_tokens=4, ignore_eos=True
)


def test_answers_come_through_it_and_are_counted(server: StartedServer) -> None:
    with closing(PoolClient(f"quill://{server.address},127.0.0.1:1")) as client:
        tokens = [id for chunk in client.stream(REQUEST, 30.0) for id in chunk.token_ids]
        assert len(tokens) == 4
        left = client.stream(REQUEST, 30.0)
        next(left)
        left.close()
        states = {each.address: each for each in client.servers()}
        assert states[server.address].num_started == 2
        assert states[server.address].num_outstanding == 0
        assert not states["127.0.0.1:1"].is_serving


def test_where_nobody_serves_nothing_is_asked_twice() -> None:
    with closing(PoolClient("quill://127.0.0.1:1,127.0.0.1:2")) as client:
        with pytest.raises(CallError) as caught:
            list(client.stream(REQUEST, 30.0))
        assert caught.value.status == "UNAVAILABLE"
        with pytest.raises(CallError):
            client.embed(pb.EmbedRequest(), 30.0)
        states = client.servers()
        assert [each.num_outstanding for each in states] == [0, 0]
        assert sum(each.num_started for each in states) == 2


def test_all_users_of_a_process_share_one(server: StartedServer) -> None:
    address = f"quill://{server.address}"
    first, second = (connect("grpc", address, Access()) for _ in range(2))
    assert first is second
    first.close()
    assert list(second.stream(REQUEST, 30.0))
