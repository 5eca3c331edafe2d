"""Beam search over the wire: what is asked, what is refused, how hypotheses are told."""

import math
from collections.abc import Iterator
from typing import Any

import pytest

from quill.__main__ import main
from quill.protos import generation_pb2 as pb
from quill.server.api import messages
from quill.server.client.sync_client import Client
from quill.server.errors import InvalidFieldError
from quill.server.frontend.reader import Arrival, RequestReader
from quill.server.frontend.spec import ParsedRequest
from quill.server.request import BeamParams
from tests.server.running import Running, make_served, running_server

ARRIVAL = Arrival(request_id="r", deadline_s=None)


def read(**fields: Any) -> ParsedRequest:
    message = pb.GenerateRequest(**{"prompt": "abc", **fields})
    spec = messages.read_generate(message)
    return RequestReader(make_served(max_num_seqs=8)).read_generate(spec, ARRIVAL)


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    with running_server() as running:
        yield running


@pytest.fixture
def client(running: Running) -> Iterator[Client]:
    with Client(running.address) as client:
        yield client


def test_one_beam_is_no_search_and_more_are() -> None:
    assert read().request.beams is None
    assert read(num_beams=1, temperature=0.7).request.beams is None
    beams = BeamParams(num_beams=4, length_penalty=0.5, early_stopping="never")
    asked = read(num_beams=4, length_penalty=0.5, early_stopping=pb.EARLY_STOPPING_NEVER)
    assert asked.request.beams == beams
    assert read(num_beams=3, temperature=0.0).request.beams == BeamParams(num_beams=3)


def test_a_search_takes_options_that_are_off() -> None:
    off = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
    assert read(num_beams=3, **off).request.beams == BeamParams(num_beams=3)


@pytest.mark.parametrize(
    ("field", "fields"),
    [
        ("num_beams", {"num_beams": 0}),
        ("num_beams", {"num_beams": -2}),
        ("num_beams", {"num_beams": 9}),
        ("num_beams", {"num_beams": 8, "stop_token_ids": range(1, 40)}),
        ("num_sequences", {"num_beams": 2, "num_sequences": 3}),
        ("length_penalty", {"num_beams": 2, "length_penalty": 11.0}),
        ("length_penalty", {"length_penalty": 1.0}),
        ("early_stopping", {"early_stopping": pb.EARLY_STOPPING_NEVER}),
        ("early_stopping", {"num_beams": 2, "early_stopping": 7}),
        ("temperature", {"num_beams": 2, "temperature": 1.0}),
        ("temperature", {"num_beams": 2, "temperature": math.nan}),
        ("top_k", {"num_beams": 2, "top_k": 5}),
        ("top_p", {"num_beams": 2, "top_p": 0.5}),
        ("min_p", {"num_beams": 2, "min_p": 0.5}),
        ("repetition_penalty", {"num_beams": 2, "repetition_penalty": 1.1}),
        ("frequency_penalty", {"num_beams": 2, "frequency_penalty": 1.0}),
        ("presence_penalty", {"num_beams": 2, "presence_penalty": 1.0}),
        ("logit_bias", {"num_beams": 2, "logit_bias": {5: 1.0}}),
        ("stop", {"num_beams": 2, "stop": ["x"]}),
    ],
    ids=str,
)
def test_what_does_not_go_with_a_search_is_refused_by_name(
    field: str, fields: dict[str, Any]
) -> None:
    with pytest.raises(InvalidFieldError) as caught:
        read(**fields)
    assert caught.value.field == field


def test_hypotheses_come_whole_best_first_with_their_scores(client: Client) -> None:
    options: Any = {"num_beams": 3, "num_sequences": 2, "max_new_tokens": 5, "logprobs": 1}
    answer = client.generate("W", **options)
    chunks = list(client.stream("W", **options))
    assert [each.text for each in answer.sequences] == [each.text for each in chunks]
    assert [each.score for each in answer.sequences] == [each.score for each in chunks]
    assert answer.sequences[0].text == "XYZ"
    assert answer.sequences[0].finish_reason == pb.FINISH_REASON_EOS
    assert answer.sequences[0].score > answer.sequences[1].score
    logprobs = [each.logprob for each in answer.sequences[0].logprobs]
    assert answer.sequences[0].score == pytest.approx(sum(logprobs) / len(logprobs))
    assert answer.usage.generated_tokens == sum(len(each.token_ids) for each in chunks)
    assert client.model().max_num_beams == 4


def test_without_beams_there_is_no_score(client: Client) -> None:
    assert not client.generate("W", max_new_tokens=5).sequences[0].HasField("score")


def test_generate_with_beams_shows_the_best_hypotheses(
    running: Running, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["generate", "W", "--address", running.address, "--beams", "3"]
    assert main([*command, "--early-stopping", "never", "--length-penalty", "1.5"]) == 0
    assert capsys.readouterr().out == "XYZ\n"
    assert main([*command, "--num-sequences", "2", "--max-new-tokens", "4"]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("[0] (-0.")
    assert first.endswith(") XYZ")
    assert second.startswith("[1] (-")
