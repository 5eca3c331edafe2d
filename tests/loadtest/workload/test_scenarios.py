"""The scenarios: reproducible, within the limits of the model, and with expected statuses."""

import re
from contextlib import closing
from dataclasses import replace

import pytest

from quill.__main__ import main
from quill.loadtest.environment.server import StartedServer
from quill.loadtest.errors import OptionError
from quill.loadtest.protocols.connect import connect
from quill.loadtest.protocols.names import PROTOCOLS, ProtocolName
from quill.loadtest.workload.call import call
from quill.loadtest.workload.request import ModelInfo
from quill.loadtest.workload.scenarios import SCENARIOS, check_model, find_scenario, make_request
from quill.protos import generation_pb2 as pb
from quill.server.balancing_headers import prefix_key
from quill.server.client.access import Access

IDS = ModelInfo(vocab_size=512, context=128, has_tokenizer=False, has_template=False)
TEXT = ModelInfo(vocab_size=49_152, context=2048, has_tokenizer=True, has_template=False)
CHAT = ModelInfo(vocab_size=49_152, context=8192, has_tokenizer=True, has_template=True)


def test_help_names_every_scenario(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "1000")  # in one line
    with pytest.raises(SystemExit):
        main(["loadtest", "--help"])
    told = re.search(r"--scenario NAME +(.*) \(default", capsys.readouterr().out)
    assert told is not None
    assert re.split("[,;] ", told[1]) == list(SCENARIOS)


@pytest.mark.parametrize("info", [IDS, TEXT, CHAT], ids=["ids", "text", "chat"])
@pytest.mark.parametrize("name", SCENARIOS)
def test_request_depends_on_seed_and_index_alone(name: str, info: ModelInfo) -> None:
    def serialized(seed: int, index: int) -> bytes:
        load = make_request(name, seed, index, info)
        return (load.embed or load.request).SerializeToString(deterministic=True)

    assert serialized(1, 5) == serialized(1, 5)
    different = {serialized(seed, index) for seed in range(2) for index in range(10)}
    assert len(different) > 15


@pytest.mark.parametrize("name", SCENARIOS)
def test_input_is_of_the_kind_that_the_model_reads(name: str) -> None:
    kinds = {make_request(name, 0, index, IDS).request.WhichOneof("input") for index in range(20)}
    assert kinds <= {"prompt_ids", None}
    kinds = {make_request(name, 0, index, CHAT).request.WhichOneof("input") for index in range(20)}
    assert kinds <= {"prompt", "messages", "prompt_ids", None}


def test_texts_to_embed_are_of_the_kind_that_the_model_reads() -> None:
    for info, kind in ((IDS, "token_ids"), (CHAT, "text")):
        loads = [make_request("embed", 0, index, info).embed for index in range(40)]
        inputs = [each for load in loads if load is not None for each in load.inputs]
        assert {each.WhichOneof("input") for each in inputs} == {kind}
        assert {len(load.inputs) for load in loads if load is not None} == {1, 4, 16}


def test_scenario_that_a_model_cant_do_is_refused() -> None:
    check_model("embed", pb.Model(embedding_size=64))
    with pytest.raises(OptionError, match="doesn't embed"):
        check_model("embed", pb.Model(name="en-de"))
    with pytest.raises(OptionError, match="--scenario embed"):
        check_model("mixed", pb.Model(name="bert", family=pb.FAMILY_ENCODER))


def test_system_prompts_are_twenty() -> None:
    for info in (TEXT, CHAT):
        loads = [make_request("system-prompts", 3, index, info).request for index in range(300)]
        assert len({prefix_key(each) for each in loads}) == 20


def test_a_model_without_text_or_end_is_not_asked_to_keep_to_a_form() -> None:
    able = pb.Model(family=pb.FAMILY_CAUSAL, has_tokenizer=True, eos_token_ids=[0])
    check_model("structured", able)
    assert ModelInfo.of(able).takes_constraints
    for unable in (
        pb.Model(family=pb.FAMILY_CAUSAL, eos_token_ids=[0]),
        pb.Model(family=pb.FAMILY_CAUSAL, has_tokenizer=True),
        pb.Model(family=pb.FAMILY_ENCODER, has_tokenizer=True, eos_token_ids=[0]),
    ):
        assert not ModelInfo.of(unable).takes_constraints
        with pytest.raises(OptionError, match=r"structured output|encoder"):
            check_model("structured", unable)


def test_forms_of_all_kinds_are_asked_for_also_among_others() -> None:
    loads = [make_request("structured", 0, index, CHAT).request.constraint for index in range(80)]
    kinds = {each.WhichOneof("kind") for each in loads}
    assert kinds == {"json_schema", "json_object", "regex", "choice", "lark"}
    assert len({each.json_schema for each in loads}) > 20
    for takes_constraints in (True, False):
        info = replace(CHAT, takes_constraints=takes_constraints)
        among = {make_request("mixed", 0, index, info).kind for index in range(80)}
        assert ("structured" in among) == takes_constraints


def test_shared_prompts_begin_alike() -> None:
    loads = [
        make_request("shared-prompt", 3, index, IDS).request.prompt_ids.ids for index in range(9)
    ]
    assert len({tuple(ids[:42]) for ids in loads}) == 1
    assert len({tuple(ids) for ids in loads}) == 9
    chats = [make_request("shared-prompt", 3, index, CHAT).request.messages for index in range(9)]
    assert len({chat.messages[0].content for chat in chats}) == 1


def test_mixtures_name_the_kind_of_each_request() -> None:
    kinds = {make_request("unfriendly", 0, index, IDS).kind for index in range(60)}
    assert kinds == {
        *("short-chat", "cancels", "slow-readers", "deadlines", "bad-requests", "reconnects")
    }
    assert make_request("short-chat", 0, 0, IDS).kind == "short-chat"


def test_unknown_scenario_is_refused() -> None:
    with pytest.raises(OptionError, match=r"no scenario 'polite'; there are short-chat, "):
        find_scenario("polite")


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("name", SCENARIOS)
def test_real_server_ends_each_request_as_the_scenario_expects(
    name: str, protocol: ProtocolName, server: StartedServer
) -> None:
    if name == "structured" or (name == "embed" and protocol != "grpc"):
        return  # `quill loadtest` refuses it
    with closing(connect(protocol, server.address_for(protocol), Access())) as client:
        for index in range(25 if name == "bad-requests" else 4):
            load = make_request(name, 0, index, IDS, max_new_tokens=3 if index % 2 else None)
            result = call(client, load, 0.0, sleep=lambda _: None).result
            assert result.status in load.expected, (index, result.message)
