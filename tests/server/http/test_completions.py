"""Completions in OpenAI's shape, one prompt and several."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from quill.server.auth.caller import Caller, QuotaUsage, RateLimits
from quill.server.auth.key_file import add_key
from quill.server.client.sync_client import Client
from tests.server.http_client import JSON, HttpClient, Reply
from tests.server.process import NEVER
from tests.server.running import Running, running_server
from tests.server.scripted_session import TIMEOUT_S, token_of

PATH = "/v1/completions"


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    with running_server(http_port=0, max_waiting=8) as server:
        yield server


def complete(client: HttpClient, prompt: Any = "abc", **options: Any) -> Reply:
    return client.post(PATH, {"prompt": prompt, **options})


def ids(text: str) -> list[int]:
    return [token_of(byte) for byte in text.encode()]


def test_answer_has_openais_shape(client: HttpClient) -> None:
    whole = complete(client, seed=3).json
    assert (whole["object"], whole["seed"]) == ("text_completion", 3)
    assert whole["id"].startswith("cmpl-")
    (choice,) = whole["choices"]
    assert choice == {
        "index": 0,
        "text": "defghijklmnopqrs",  # 16 tokens, where nothing is said
        "logprobs": None,
        "finish_reason": "length",
    }


@pytest.mark.parametrize("prompt", ["abc", ids("abc")])
def test_text_and_token_ids_are_the_same(client: HttpClient, prompt: Any) -> None:
    assert complete(client, prompt, max_tokens=3).json["choices"][0]["text"] == "def"


def test_batch_is_answered_in_order_whatever_its_size(client: HttpClient) -> None:
    letters = [chr(ord("a") + number % 20) for number in range(40)]  # the queue has 8 places
    prompts = [letters[0], *map(ids, letters[1:20]), *letters[20:]]
    whole = complete(client, prompts, max_tokens=2, n=2).json
    assert [each["index"] for each in whole["choices"]] == list(range(80))
    expected = [chr(ord(letter) + 1) + chr(ord(letter) + 2) for letter in letters]
    assert [each["text"] for each in whole["choices"][::2]] == expected
    assert [each["text"] for each in whole["choices"][1::2]] == expected
    usage = whole["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (40, 160)


def test_batch_has_one_seed_and_each_answer_is_the_one_alone(client: HttpClient) -> None:
    options = {"temperature": 5.0, "seed": 9, "max_tokens": 5}
    together = complete(client, ["ab", "cd"], **options).json["choices"]
    alone = [complete(client, each, **options).json["choices"][0] for each in ("ab", "cd")]
    assert [each["text"] for each in together] == [each["text"] for each in alone]


def test_batch_is_streamed_with_its_indices(client: HttpClient) -> None:
    reply = complete(
        client, ["abc", "mno"], n=2, max_tokens=3, stream=True,
        stream_options={"include_usage": True},
    )  # fmt: skip
    *chunks, last = reply.events
    texts = [""] * 4
    for chunk in chunks:
        texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    assert texts == ["def", "def", "pqr", "pqr"]
    assert last["usage"]["prompt_tokens"] == 6
    assert last["usage"]["completion_tokens"] == 12


def test_bad_prompt_in_a_batch_refuses_all_of_it(client: HttpClient) -> None:
    reply = complete(client, ["abc", ""], stream=True)
    assert (reply.status, reply.error["param"]) == (400, "prompt")
    reply = complete(client, [ids("abc"), [999]])
    assert (reply.status, reply.error["param"]) == (400, "prompt")


@contextmanager
def with_key(
    keys: Path, max_waiting: int = 4, **limits: int
) -> Iterator[tuple[Running, HttpClient]]:
    """A server that knows one key, and a client that has it."""
    secret = add_key(keys, "alice", **limits)
    with running_server(http_port=0, api_keys=keys, max_waiting=max_waiting) as running:
        headers = JSON | {"authorization": f"Bearer {secret}"}
        yield running, HttpClient(running.http_port, headers)


def test_batch_is_one_call_of_its_key(tmp_path: Path) -> None:
    limits = {"requests_per_minute": 6}  # of which one may come at once
    with with_key(tmp_path / "keys.json", **limits) as (running, client):
        assert complete(client, ["a", "b", "c"]).status == 200
        record = running.next_record("OK")
        assert (record.num_prompt, record.caller, record.frontend) == (3, "alice", "http")
        refused = complete(client, ["a"])
        assert (refused.status, refused.error["type"]) == (429, "rate_limit_error")
        assert 0 < int(refused.headers["retry-after-ms"]) <= 10_000
        assert 1 <= int(refused.headers["retry-after"]) <= 10


def test_batch_beyond_its_keys_tokens_is_let_in_whole_and_the_next_call_waits(
    tmp_path: Path,
) -> None:
    limits = {"tokens_per_minute": 60}  # of which ten may come at once
    with with_key(tmp_path / "keys.json", **limits) as (_, client):
        assert complete(client, [[5] * 7, [6] * 7, [7] * 7]).status == 200
        assert complete(client, ["a"]).status == 429


class SlowLimits(RateLimits):
    """Whoever counts is asked in a message, as with several frontends."""

    @asynccontextmanager
    async def tokens(
        self, caller: Caller, num_prompt: int, is_admitted: bool = False
    ) -> AsyncIterator[QuotaUsage]:
        await asyncio.sleep(0)
        async with super().tokens(caller, num_prompt, is_admitted) as usage:
            yield usage


def test_batch_is_admitted_once_where_frontends_share_a_quota(tmp_path: Path) -> None:
    limits = {"tokens_per_minute": 60}  # of which ten may come at once
    with with_key(tmp_path / "keys.json", max_waiting=64, **limits) as (running, client):
        running.server.calls.limits = SlowLimits()
        assert complete(client, [[5] * 7, [6] * 7, [7] * 7]).status == 200
        assert complete(client, ["a"]).status == 429


def test_logprobs_have_offsets_and_the_chosen_token(client: HttpClient) -> None:
    rated = complete(client, "é", max_tokens=4, logprobs=1).json["choices"][0]["logprobs"]
    assert rated["tokens"] == ["bytes:\\xc3", "bytes:\\xa9"] * 2
    assert rated["text_offset"] == [0, 0, 1, 1]
    assert [max(each.values()) for each in rated["top_logprobs"]] == rated["token_logprobs"]


def test_offsets_go_on_through_a_stream(client: HttpClient) -> None:
    chunks = complete(client, "abc", max_tokens=5, logprobs=0, stream=True).events
    offsets = [at for each in chunks for at in each["choices"][0]["logprobs"]["text_offset"]]
    assert offsets == [0, 1, 2, 3, 4]


def test_echo_puts_the_prompt_first(client: HttpClient) -> None:
    choice = complete(client, "abc", max_tokens=2, echo=True, logprobs=1).json["choices"][0]
    assert choice["text"] == "abcde"
    assert choice["logprobs"]["tokens"] == list("abcde")
    assert choice["logprobs"]["token_logprobs"][0] is None
    assert choice["logprobs"]["top_logprobs"][0] is None


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_echo_rates_a_text_as_score_does(
    running: Running, client: HttpClient, max_tokens: int
) -> None:
    """What lm-eval sends, with one token, and what others send, with none."""
    prompts = [ids("abcxyz"), ids("hello")]
    whole = complete(client, prompts, max_tokens=max_tokens, echo=True, logprobs=1, seed=1).json
    assert whole["usage"]["completion_tokens"] == 2 * max_tokens
    with Client(running.address, NEVER) as grpc_client:
        for prompt, choice in zip(prompts, whole["choices"], strict=True):
            score = grpc_client.score(prompt, timeout_s=TIMEOUT_S)
            rated = choice["logprobs"]["token_logprobs"][: len(prompt)]
            assert rated[1:] == [each.logprob for each in score.tokens[1:]]
            assert len(choice["logprobs"]["tokens"]) == len(prompt) + max_tokens
            assert choice["finish_reason"] == "length"


def test_no_tokens_without_echo_make_no_sense(client: HttpClient) -> None:
    assert complete(client, max_tokens=0).error["param"] == "max_tokens"


@pytest.mark.parametrize(
    ("name", "value"),
    [("suffix", "end"), ("best_of", 3), ("prompt", [[]]), ("prompt", []), ("prompt", [1.5]),
     ("prompt", [True]), ("prompt", 5), ("prompt", [-1]), ("logprobs", 21), ("logprobs", True)],
)  # fmt: skip
def test_bad_values_are_refused_by_name(client: HttpClient, name: str, value: Any) -> None:
    reply = client.post(PATH, {"prompt": "abc", name: value})
    assert (reply.status, reply.error["param"]) == (400, name)


def test_best_of_n_is_n(client: HttpClient) -> None:
    assert len(complete(client, n=2, best_of=2).json["choices"]) == 2


def test_prompt_is_required(client: HttpClient) -> None:
    assert client.post(PATH, {}).error["param"] == "prompt"
