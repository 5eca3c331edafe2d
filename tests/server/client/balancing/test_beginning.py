"""Which requests begin alike."""

from quill.server.client.balancing.beginning import beginning
from quill.server.client.requests import make_request

SYSTEM = {"role": "system", "content": "You are a pirate. " * 50}


def test_conversations_with_one_system_prompt_begin_alike() -> None:
    asked = [
        make_request([SYSTEM, {"role": "user", "content": words}], {}) for words in ("Hi", "Ho")
    ]
    assert beginning(asked[0]) == beginning(asked[1])
    other = {**SYSTEM, "content": SYSTEM["content"] + "."}
    assert beginning(make_request([other], {})) != beginning(asked[0])
    assert beginning(make_request([{**SYSTEM, "role": "user"}], {})) != beginning(asked[0])


def test_later_turns_begin_as_the_first_did() -> None:
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]
    assert beginning(make_request(turns[:1], {})) == beginning(make_request(turns, {}))


def test_texts_and_tokens_count_by_their_first_ones() -> None:
    for long in ("x" * 300, [5] * 100):
        assert beginning(
            make_request([*long, 1] if isinstance(long, list) else long + "y", {})
        ) == (beginning(make_request(long, {})))
    assert beginning(make_request("ab", {})) != beginning(make_request("ac", {}))
    assert beginning(make_request([1, 12], {})) != beginning(make_request([11, 2], {}))
    assert beginning(make_request("", {})) is None
