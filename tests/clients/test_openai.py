"""OpenAI's own package, against a real server."""

import asyncio
import json
import time
from collections.abc import Iterator
from typing import Any

import pytest

openai = pytest.importorskip(
    "openai", reason="openai isn't installed here: make test-clients has it", minversion="3"
)

from tests.clients.conftest import PATIENCE_S, Server  # noqa: E402

ASKED = [{"role": "user", "content": "Name three colours."}]


@pytest.fixture
def client(server: Server) -> Iterator[Any]:
    with openai.OpenAI(
        base_url=server.base_url, api_key=server.key, max_retries=0, timeout=PATIENCE_S
    ) as made:
        yield made


def test_chat(server: Server, client: Any) -> None:
    answers = [
        client.chat.completions.create(
            model=server.model, messages=ASKED, max_completion_tokens=20, seed=7, temperature=1
        )
        for _ in range(2)
    ]
    assert answers[0].choices[0].message.content == answers[1].choices[0].message.content
    assert answers[0].choices[0].finish_reason in ("stop", "length")
    assert answers[0].system_fingerprint == answers[1].system_fingerprint
    assert answers[0].usage.total_tokens > answers[0].usage.prompt_tokens > 0
    assert answers[1].usage.prompt_tokens_details.cached_tokens > 0


def test_chat_streamed_is_the_same(server: Server, client: Any) -> None:
    options = {"model": server.model, "messages": ASKED, "max_tokens": 20, "seed": 7, "n": 2}
    whole = client.chat.completions.create(**options)
    texts = ["", ""]
    usage: Any = None
    stream = client.chat.completions.create(
        **options, stream=True, stream_options={"include_usage": True}
    )
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == [each.message.content for each in whole.choices]
    assert usage.completion_tokens == whole.usage.completion_tokens


def test_chat_logprobs(server: Server, client: Any) -> None:
    answer = client.chat.completions.create(
        model=server.model,
        messages=[{"role": "user", "content": "Reply with an emoji: 🙂"}],
        max_tokens=12,
        logprobs=True,
        top_logprobs=3,
        temperature=0,
    )
    choice = answer.choices[0]
    content = choice.logprobs.content
    assert len(content) == answer.usage.completion_tokens
    assert all(len(each.top_logprobs) == 3 and each.logprob <= 0 for each in content)
    told = b"".join(bytes(each.bytes) for each in content)
    assert told.decode("utf-8", "replace").startswith(choice.message.content)


TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather in a city",
            "strict": True,
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "maxLength": 20},
                    "unit": {"enum": ["celsius", "fahrenheit"]},
                },
                "required": ["city", "unit"],
                "additionalProperties": False,
            },
        },
    },
    {"type": "function", "function": {"name": "get_time", "description": "What time it is"}},
]


def test_tools(server: Server, client: Any) -> None:
    asked = {"role": "user", "content": "What is the weather in Paris?"}
    options = {"model": server.model, "tools": TOOLS, "seed": 1, "max_tokens": 100}
    ask = client.chat.completions.create
    chosen = {"type": "function", "function": {"name": "get_weather"}}
    answer = ask(messages=[asked], tool_choice=chosen, **options)
    (choice,) = answer.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    (call,) = choice.message.tool_calls
    assert call.function.name == "get_weather"
    arguments = json.loads(call.function.arguments)
    assert set(arguments) == {"city", "unit"}
    assert arguments["unit"] in ("celsius", "fahrenheit")
    result = {"role": "tool", "tool_call_id": call.id, "content": '{"temperature": 21}'}
    spoken = ask(messages=[asked, choice.message, result], tool_choice="none", **options)
    assert spoken.choices[0].message.tool_calls is None


def test_tools_streamed_are_the_same(server: Server, client: Any) -> None:
    options = {
        "model": server.model,
        "messages": [{"role": "user", "content": "What time is it, and how warm?"}],
        "tools": TOOLS,
        "tool_choice": "required",
        "seed": 5,
        "max_tokens": 100,
    }
    (whole,) = client.chat.completions.create(**options).choices
    with client.chat.completions.stream(**options) as stream:
        for _ in stream:
            pass
        (told,) = stream.get_final_completion().choices
    assert told.finish_reason == whole.finish_reason == "tool_calls"
    for one, other in zip(told.message.tool_calls, whole.message.tool_calls, strict=True):
        assert one.id == other.id
        assert one.function.name == other.function.name
        assert one.function.arguments == other.function.arguments


def test_completions_batch_and_echo(server: Server, client: Any) -> None:
    prompts = ["The capital of France is", "One, two, three,"]
    together = client.completions.create(
        model=server.model, prompt=prompts, max_tokens=5, temperature=0, logprobs=2, echo=True
    )
    assert [each.index for each in together.choices] == [0, 1]
    for prompt, choice in zip(prompts, together.choices, strict=True):
        assert choice.text.startswith(prompt)
        assert "".join(choice.logprobs.tokens) == choice.text
        assert choice.logprobs.token_logprobs[0] is None
        place = choice.logprobs.text_offset[-1]
        assert choice.text[place:] == choice.logprobs.tokens[-1]


def test_options_of_vllm_pass_through(server: Server, client: Any) -> None:
    answer = client.chat.completions.create(
        model=server.model,
        messages=ASKED,
        max_tokens=12,
        extra_body={
            "top_k": 5,
            "min_p": 0.05,
            "repetition_penalty": 1.1,
            "ignore_eos": True,
            "min_tokens": 12,
            "return_token_ids": True,
        },
    )
    assert answer.usage.completion_tokens == 12
    assert len(answer.choices[0].model_extra["token_ids"]) == 12


def test_embeddings(embedder: Server, client: Any) -> None:
    texts = ["A cat", "A dog"]
    default = client.embeddings.create(model=embedder.model, input=texts)  # base64, unasked
    plain = client.embeddings.create(model=embedder.model, input=texts, encoding_format="float")
    for one, other in zip(default.data, plain.data, strict=True):
        assert one.embedding == pytest.approx(other.embedding, rel=1e-6)


def test_errors_are_the_packages_own(server: Server, client: Any) -> None:
    ask = client.chat.completions.create
    with pytest.raises(openai.BadRequestError) as bad:
        ask(model=server.model, messages=ASKED, temperature=-1)
    assert bad.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as bad:
        ask(model=server.model, messages=ASKED, tools=[{"type": "function", "function": {}}])
    assert bad.value.param == "tools[0].function.name"
    with pytest.raises(openai.NotFoundError):
        ask(model="gpt-5", messages=ASKED)
    with pytest.raises(openai.NotFoundError):
        client.responses.create(model=server.model, input="hello")
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="wrong").models.list()


def test_retries_on_429_wait_as_they_are_told(server: Server) -> None:
    with openai.OpenAI(
        base_url=server.base_url, api_key=server.slow_key, max_retries=3, timeout=PATIENCE_S
    ) as client:
        before = len([line for line in server.lines() if line["outcome"] == "RESOURCE_EXHAUSTED"])
        started_s = time.monotonic()
        for _ in range(4):
            client.models.list()
        assert time.monotonic() - started_s > 1
        refused = [line for line in server.lines() if line["outcome"] == "RESOURCE_EXHAUSTED"]
        assert 1 <= len(refused) - before <= 6, (
            "a client that is told when to come back doesn't press"
        )
        hasty = client.with_options(max_retries=0)
        with pytest.raises(openai.RateLimitError):
            [hasty.models.list() for _ in range(4)]


def test_leaving_a_stream_cancels_it(server: Server, client: Any) -> None:
    stream = client.chat.completions.create(
        model=server.model,
        messages=ASKED,
        max_tokens=2000,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    first = next(iter(stream))
    stream.close()
    _wait_for_outcome(server, first.id.removeprefix("chatcmpl-"), "CANCELLED")


def _wait_for_outcome(server: Server, request_id: str, outcome: str) -> None:
    end_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < end_s:
        for line in server.lines():
            if line["request_id"] == request_id:
                assert line["outcome"] == outcome
                return
        time.sleep(0.05)
    raise AssertionError("the call went on")


def test_async_many_at_once(server: Server) -> None:
    async def main() -> list[str]:
        async with openai.AsyncOpenAI(
            base_url=server.base_url, api_key=server.key, timeout=PATIENCE_S
        ) as client:

            async def ask(seed: int) -> str:
                answer = await client.chat.completions.create(
                    model=server.model, messages=ASKED, max_tokens=8, seed=seed % 2
                )
                return str(answer.choices[0].message.content)

            return list(await asyncio.gather(*map(ask, range(8))))

    answers = asyncio.run(main())
    assert len(set(answers[::2])) == 1
    assert len(set(answers[1::2])) == 1
