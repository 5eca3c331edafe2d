"""Clients, blocking and asyncio: what they ask, and when they ask again."""

import asyncio
import threading
from typing import Any

import grpc
import numpy as np
import pytest

from quill.protos import generation_pb2 as pb
from quill.server.api import grpc_server
from quill.server.client.async_client import AsyncClient
from quill.server.client.call_error import CallError
from quill.server.client.requests import (
    Options,
    embed_request,
    fill_request,
    make_request,
    score_request,
)
from quill.server.client.retry import Retries
from quill.server.client.sync_client import Client
from tests.server.parrot import Parrot, make_parrot
from tests.server.running import running_server
from tests.server.scripted_session import TIMEOUT_S

OVERLOADED = grpc.StatusCode.RESOURCE_EXHAUSTED
UNAVAILABLE = grpc.StatusCode.UNAVAILABLE


def error(code: grpc.StatusCode, retry_after_s: float | None = None) -> CallError:
    return CallError(code, "no", retry_after_s=retry_after_s)


def test_prompts_are_text_tokens_or_a_conversation() -> None:
    assert make_request("hi", {}).prompt == "hi"
    assert list(make_request([1, 2], {}).prompt_ids.ids) == [1, 2]
    spoken = make_request([{"role": "user", "content": "hi"}], {"seed": 0})
    assert spoken.messages.messages[0].content == "hi"
    assert spoken.HasField("seed")
    assert not spoken.HasField("temperature")


def test_tools_and_choices_may_be_written_plainly() -> None:
    spoken: list[dict[str, Any]] = [
        {"role": "assistant", "tool_calls": [{"id": "1", "name": "f", "arguments": "{}"}]},
        {"role": "tool", "content": "4", "tool_call_id": "1"},
    ]
    schema = {"type": "object"}
    request = make_request(
        spoken,
        {
            "tools": [{"name": "f", "parameters": schema}, pb.Tool(name="g"), {"name": "h"}],
            "tool_choice": "f",
        },
    )
    assert request.messages.messages[0].tool_calls[0].name == "f"
    assert [each.parameters for each in request.tools] == ['{"type": "object"}', "", ""]
    assert request.tool_choice == pb.ToolChoice(mode=pb.TOOL_MODE_REQUIRED, names=["f"])
    for name in ("auto", "none", "required"):
        mode = make_request("x", {"tool_choice": name}).tool_choice.mode
        assert pb.ToolMode.Name(mode) == f"TOOL_MODE_{name.upper()}"
    with pytest.raises(CallError, match="can't be written"):
        make_request("x", {"tools": [{"nam": "f"}]})


@pytest.mark.parametrize(
    ("prompt", "options", "said"),
    [
        ([{"role": "user", "content": "hi"}, "there"], {}, "a str is among the messages"),
        ([1, "x"], {}, "a int is among the messages"),
        ({"role": "user", "content": "hi"}, {}, "the prompt is a dict"),
        (b"Once", {}, "the prompt is a bytes"),
        ("x", {"tools": "f"}, "a str is among the tools"),
        ("x", {"tools": {"name": "f"}}, "a str is among the tools"),
    ],
)
def test_what_is_no_prompt_or_tool_is_refused_and_never_left_out(
    prompt: Any, options: Any, said: str
) -> None:
    with pytest.raises(CallError, match=said):
        make_request(prompt, options)


def test_messages_and_token_ids_may_be_of_their_libraries() -> None:
    said: list[Any] = [
        pb.Message(role="system", content="Be brief."),
        {"role": "user", "content": "hi"},
    ]
    assert [each.role for each in make_request(said, {}).messages.messages] == ["system", "user"]
    assert list(make_request(np.array([1, 2]), {}).prompt_ids.ids) == [1, 2]  # type: ignore[arg-type]


def test_texts_to_embed_are_one_or_several_each_as_text_or_tokens() -> None:
    one = embed_request("hi", {"pooling": "last", "normalize": False})
    assert [each.text for each in one.inputs] == ["hi"]
    assert (one.pooling, one.HasField("normalize")) == (pb.POOLING_LAST, True)
    several = embed_request(["hi", [1, 2]], {})
    assert [each.WhichOneof("input") for each in several.inputs] == ["text", "token_ids"]
    assert list(fill_request([1, 2], None).token_ids.ids) == [1, 2]
    with pytest.raises(CallError, match="'middle'; it must be mean or first or last"):
        embed_request("hi", {"pooling": "middle"})


@pytest.mark.parametrize("options", [{"seed": -1}, {"no_such": 1}, {"top_k": 2**40}])
def test_what_the_wire_cannot_carry_is_refused_here(options: Any) -> None:
    with pytest.raises(CallError) as caught:
        make_request("hi", options)
    assert caught.value.code is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize("text", ["\ud800", [2**40], [-1.5]])
def test_what_the_wire_cannot_carry_of_a_text_is_refused_here(text: Any) -> None:
    for write in (score_request, lambda text: fill_request(text, None), embed_request_of):
        with pytest.raises(CallError) as caught:
            write(text)
        assert caught.value.code is grpc.StatusCode.INVALID_ARGUMENT


def embed_request_of(text: Any) -> pb.EmbedRequest:
    return embed_request([text], {})


def test_servers_own_delay_goes_first() -> None:
    assert Retries().delay_s(error(OVERLOADED, 3.0), 0, None) == 3.0


def test_delays_without_a_wish_grow_and_are_spread_out() -> None:
    retries = Retries(first_s=1.0, max_s=3.0)
    for num_tried, most in enumerate((1.0, 2.0, 3.0, 3.0)):
        delay_s = retries.delay_s(error(UNAVAILABLE), num_tried, None)
        assert delay_s is not None
        assert most / 2 <= delay_s <= most


@pytest.mark.parametrize(
    ("failure", "num_tried", "left_s"),
    [
        (error(OVERLOADED, 1.0), 5, None),  # often enough
        (error(OVERLOADED, 2.0), 0, 1.5),  # the deadline comes first
        (error(OVERLOADED), 0, None),  # a message that is too large
        (error(grpc.StatusCode.INVALID_ARGUMENT), 0, None),
        (error(grpc.StatusCode.INTERNAL), 0, None),
        (error(grpc.StatusCode.DEADLINE_EXCEEDED), 0, None),
    ],
)
def test_there_is_no_use_in_trying_again(
    failure: CallError, num_tried: int, left_s: float | None
) -> None:
    assert Retries().delay_s(failure, num_tried, left_s) is None


def test_stream_that_is_closed_ends_the_request() -> None:
    with running_server() as running, Client(running.address) as client:
        running.session.hold()
        running.session.let_go(1)
        chunks = client.stream("abc", max_new_tokens=100, timeout_s=TIMEOUT_S)
        assert next(chunks).text == "d"
        chunks.close()
        record = running.next_record("CANCELLED")
        assert (record.num_prompt, record.num_generated) == (3, 1)
        running.session.let_go()


def test_client_for_asyncio_does_the_same() -> None:
    async def main(address: str) -> None:
        async with AsyncClient(address) as client:
            answer = await client.generate("abc", max_new_tokens=3, timeout_s=TIMEOUT_S)
            assert answer.sequences[0].text == "def"
            stream = client.stream("abc", max_new_tokens=3, timeout_s=TIMEOUT_S)
            assert "".join([chunk.text async for chunk in stream]) == "def"
            assert (await client.model()).name == "reciter"
            assert await client.detokenize(await client.tokenize("abc")) == "abc"
            assert len((await client.score("abc")).tokens) == 3
            with pytest.raises(CallError) as caught:
                await client.generate("", timeout_s=TIMEOUT_S)
            assert caught.value.field == "prompt"

    with running_server() as running:
        asyncio.run(main(running.address))


def test_both_clients_hear_what_is_called() -> None:
    spoken = 'Hm.\n<tool_call>\n{"name": "f", "arguments": {"x": 4}}\n</tool_call>'
    asked = [{"role": "user", "content": f"say {spoken}"}]
    schema = {"properties": {"x": {"type": "integer"}}, "required": ["x"]}
    options: Options = {"tools": [{"name": "f", "parameters": schema}], "seed": 3}

    async def main(address: str) -> list[pb.GenerateChunk]:
        async with AsyncClient(address) as client:
            return [chunk async for chunk in client.stream(asked, resume=True, **options)]

    with running_server(served=make_parrot(), session=Parrot()) as running:
        chunks = asyncio.run(main(running.address))
        with Client(running.address) as client:
            (whole,) = client.generate(asked, **options).sequences
            assert client.model().tool_call_format == "hermes"
    (call,) = whole.tool_calls
    assert (whole.text, call.name, call.arguments) == ("Hm.\n", "f", '{"x": 4}')
    assert whole.finish_reason == chunks[-1].finish_reason == pb.FINISH_REASON_EOS
    assert "".join(chunk.text for chunk in chunks) == whole.text
    pieces = [piece for chunk in chunks for piece in chunk.tool_calls]
    assert [(each.id, each.name) for each in pieces if each.id] == [(call.id, "f")]
    assert "".join(each.arguments for each in pieces) == call.arguments


def test_client_for_asyncio_says_so_and_tries_again_while_the_server_is_loading(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def main(running: Any) -> pb.GenerateResponse:
        async def sleep(delay_s: float) -> None:
            assert "the server is loading its model" in caplog.text
            running.loading.set()
            await asyncio.to_thread(running.call, running.server.ready.wait())

        async with AsyncClient(running.address, sleep=sleep) as client:
            return await client.generate("abc", max_new_tokens=2, timeout_s=TIMEOUT_S)

    with running_server(wait=False) as running:
        assert asyncio.run(main(running)).sequences[0].text == "de"


def test_whoever_waits_is_told_once_what_for_and_how_long(
    caplog: pytest.LogCaptureFixture,
) -> None:
    waits: list[float] = []
    retries = Retries(max_retries=3)
    with (
        Client("127.0.0.1:1", retries, sleep=waits.append) as client,
        pytest.raises(CallError),
    ):
        client.model()
    assert len(waits) == 3
    (told,) = caplog.messages
    assert told.startswith("no server answers: ipv4:127.0.0.1:1: ")
    assert told.endswith(f"(trying again in {waits[0]:.1f} s, 3 times at most)")


def test_overload_is_told_as_that(caplog: pytest.LogCaptureFixture) -> None:
    Retries().warn(error(OVERLOADED, 2.0), 2.0)
    assert caplog.messages == ["the server is busy: no (trying again in 2.0 s, 5 times at most)"]


def test_call_that_grpc_drops_unread_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc_server, "MAX_UNREAD", 1)
    held, dropped = threading.Event(), threading.Event()
    texts: list[str] = []

    def sleep(_: float) -> None:
        dropped.set()
        held.set()

    def call() -> None:
        with Client(running.address, Retries(max_retries=10**6), sleep) as client:
            answer = client.generate("abc", max_new_tokens=2, timeout_s=TIMEOUT_S)
            texts.append(answer.sequences[0].text)

    with running_server(max_waiting=8) as running:
        # While the loop stands still, gRPC itself takes in a call or two and drops the others.
        running._loop.call_soon_threadsafe(held.wait, TIMEOUT_S)
        threads = [threading.Thread(target=call) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(TIMEOUT_S)
        held.set()
    assert dropped.is_set()
    assert texts == 8 * ["de"]
