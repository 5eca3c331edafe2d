"""`quill bench speculative` compares two engines, and says what it can't compare."""

from pathlib import Path

import pytest

from quill.__main__ import main
from quill.loadtest.bench.contenders.quill import Quill
from quill.loadtest.bench.contest import Running
from quill.loadtest.bench.guesses import Case, _measure
from quill.loadtest.errors import ContenderError

PROMPT = [5, 6, 7, 8, 9, 10] * 4


class Contender:
    """Answers orders as a process would, and may lie about a token."""

    def __init__(self, quill: Quill, lies: bool = False) -> None:
        self._quill = quill
        self._lies = lies

    def ask(self, order: dict[str, object]) -> dict[str, object]:
        wishes = {name: value for name, value in order.items() if name != "do"}
        answer = vars(self._quill.write(**wishes))  # type: ignore[arg-type]
        return answer | {"token_ids": [0]} if self._lies else answer


@pytest.fixture(scope="module")
def without(bundle: Path) -> Quill:
    return Quill(bundle, "fp32", 1)


@pytest.fixture(scope="module")
def guessing(bundle: Path) -> Quill:
    return Quill(bundle, "fp32", 1, speculative=True)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_both_write_the_same_and_one_of_them_guesses(
    without: Quill, guessing: Quill, temperature: float
) -> None:
    plain = without.write(PROMPT, 24, temperature, seed=1)
    found = guessing.write(PROMPT, 24, temperature, seed=1)
    assert found.token_ids == plain.token_ids
    assert plain.num_draft_tokens == 0 <= found.num_accepted <= found.num_draft_tokens


def test_a_token_that_changes_ends_the_comparison(without: Quill) -> None:
    case = Case("text", tuple(PROMPT), 0.0)
    honest: Running = Contender(without)  # type: ignore[assignment]
    liar: Running = Contender(without, lies=True)  # type: ignore[assignment]
    assert _measure(case, honest, honest, 1).num_tokens > 0
    with pytest.raises(ContenderError, match="guesses changed tokens: text"):
        _measure(case, honest, liar, 1)


def test_a_bundle_that_continues_no_text_is_refused(
    bundle: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "speculative", str(bundle)]) == 2
    assert "give the bundle of a causal model" in capsys.readouterr().err
