"""The operators of recurrent networks, against plain numpy."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quill.export.verify.runner import Array, open_session
from tests.export.operators.attention_steps import normal, padded, starts
from tests.export.operators.custom_kernels import (
    FLOAT,
    INT32,
    check_all_kernels_agree,
    save_operator,
)
from tests.operators import needs_operators

pytestmark = needs_operators

SIZE = 48
NUM_BLOCKS = 6
KINDS = {"rnn": 0, "gru": 1, "lstm": 2}
NUM_GATES = {"rnn": 1, "gru": 3, "lstm": 4}
HEADS = {"heads": 1, "kv_heads": 1, "head_size": SIZE, "scale": 1.0}
LENGTHS = (5, 1, 17, 33)
BLOCKS = [[4], [0], [2, 1], [5, 3, 2]]


def save(
    directory: Path,
    operator: str,
    given: Mapping[str, Array],
    outputs: list[str],
    constants: Mapping[str, Array],
    **attributes: Any,
) -> Path:
    """A graph of one operator. Its inputs in their order, those that are constants too."""
    names = list(given)
    for index, name in enumerate(constants, 1):
        names.insert(index, name)
    types = {name: INT32 if array.dtype == np.int32 else FLOAT for name, array in given.items()}
    results = dict.fromkeys(outputs, FLOAT)
    return save_operator(directory, operator, names, types, results, constants, attributes)


def run(path: Path, given: Mapping[str, Array], num_threads: int = 2) -> list[Array]:
    found = open_session(path, num_threads).run(None, dict(given))
    return [each for each in found if isinstance(each, np.ndarray)]


def sigmoid(x: Array) -> Array:
    result: Array = 1 / (1 + np.exp(-x))
    return result


def updated(kind: str, x: Array, s: Array, h: Array, c: Array) -> tuple[Array, Array]:
    """One state, by the book."""
    if kind == "rnn":
        return (np.tanh(x + s),) * 2
    if kind == "gru":
        (reset, keep, new), (of_reset, of_keep, of_new) = np.split(x, 3), np.split(s, 3)
        new = np.tanh(new + sigmoid(reset + of_reset) * of_new)
        keep = sigmoid(keep + of_keep)
        return ((1 - keep) * new + keep * h,) * 2
    write, keep, new, show = np.split(x + s, 4)
    c = sigmoid(keep) * c + sigmoid(write) * np.tanh(new)
    return sigmoid(show) * np.tanh(c), c


def weights(kind: str) -> dict[str, Array]:
    num_gates = NUM_GATES[kind] * SIZE
    return {"weights": 0.3 * normal(SIZE, num_gates, seed=1), "bias": normal(num_gates, seed=2)}


def read(kind: str, x: Array, backwards: bool) -> Array:
    """The states after each token, in double precision."""
    constants = {name: each.astype(np.float64) for name, each in weights(kind).items()}
    h = c = np.zeros(SIZE)
    states = np.zeros((len(x), SIZE))
    for t in range(len(x))[:: -1 if backwards else 1]:
        said = h @ constants["weights"] + constants["bias"]
        h, c = updated(kind, x[t].astype(np.float64), said, h, c)
        states[t] = h
    return states


@pytest.mark.portable
@pytest.mark.parametrize("backwards", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_cell_goes_through_each_sequence_as_if_it_were_alone(
    kind: str, backwards: bool, tmp_path: Path
) -> None:
    sources = [normal(length, NUM_GATES[kind] * SIZE, seed=length) for length in LENGTHS]
    given = {"input": np.concatenate(sources), "query_starts": starts(LENGTHS)}
    cell = {"kind": KINDS[kind], "size": SIZE, "backwards": int(backwards)}
    path = save(tmp_path, "Recurrence", given, ["states"], weights(kind), **cell)
    together = np.split(run(path, given)[0], np.cumsum(LENGTHS)[:-1])
    for source, states in zip(sources, together, strict=True):
        np.testing.assert_allclose(states, read(kind, source, backwards), atol=2e-5)
        alone = {"input": source, "query_starts": starts([len(source)])}
        np.testing.assert_array_equal(run(path, alone, num_threads=1)[0], states)


@pytest.mark.parametrize("kind", KINDS)
def test_states_are_updated_each_as_if_alone(kind: str, tmp_path: Path) -> None:
    wide = NUM_GATES[kind] * SIZE
    given = {"input": normal(21, wide), "state": normal(21, wide, seed=1)}
    given |= {"h": normal(21, SIZE, seed=2), "c": normal(21, SIZE, seed=3)}
    path = save(tmp_path, "Update", given, ["new_h", "new_c"], {}, kind=KINDS[kind], size=SIZE)
    found = run(path, given)
    for row, both in enumerate(zip(*found, strict=True)):
        one = {name: array[row : row + 1] for name, array in given.items()}
        wanted = updated(kind, *(array[0].astype(np.float64) for array in one.values()))
        for side, alone, expected in zip(both, run(path, one), wanted, strict=True):
            np.testing.assert_allclose(side, expected, atol=1e-6)
            np.testing.assert_array_equal(side, alone[0])


def test_what_is_not_finite_stays_so(tmp_path: Path) -> None:
    given = {"input": np.array([[np.nan, np.inf, -np.inf, 1e30, -90.0, 0.0] * 8], np.float32)}
    path = save(tmp_path, "Update", given, ["h", "c"], {}, kind=0, size=SIZE)
    found = run(path, given)[0][0, :6]
    assert np.isnan(found[:3]).all()
    np.testing.assert_array_equal(found[3:], [1, -1, 0])


def caches() -> dict[str, Array]:
    return {
        "key_cache": normal(NUM_BLOCKS, 1, SIZE, 16, seed=7),
        "value_cache": normal(NUM_BLOCKS, 1, 16, SIZE, seed=8),
    }


def kept(blocks: list[int], length: int) -> tuple[Array, Array]:
    """A sequence's keys and values: positions x size."""
    keys, values = caches()["key_cache"][blocks], caches()["value_cache"][blocks]
    both = keys[:, 0].transpose(0, 2, 1), values[:, 0]
    return both[0].reshape(-1, SIZE)[:length], both[1].reshape(-1, SIZE)[:length]


def attend(directory: Path, who: list[int], q: Array) -> tuple[Path, dict[str, Array]]:
    given = {"q": q, **caches(), "query_starts": starts([1] * len(who))}
    given |= {"source_lengths": np.array([LENGTHS[i] for i in who], np.int32)}
    given |= {"source_table": padded([BLOCKS[i] for i in who])}
    score = {"score": normal(SIZE, seed=9)}
    path = save(directory, "AdditiveAttention", given, ["attended"], score, **HEADS)
    return path, given


@pytest.mark.portable
def test_additive_attention_looks_at_a_source_alone_and_batched(tmp_path: Path) -> None:
    who = [3, 0, 3, 1, 2]
    q, score = normal(len(who), SIZE), normal(SIZE, seed=9).astype(np.float64)
    together = run(*attend(tmp_path, who, q))[0]
    for row, index in enumerate(who):
        keys, values = kept(BLOCKS[index], LENGTHS[index])
        scores = np.tanh(keys + q[row].astype(np.float64)) @ score
        shares = np.exp(scores - scores.max())
        np.testing.assert_allclose(together[row], shares / shares.sum() @ values, atol=2e-5)
        alone = run(*attend(tmp_path, [index], q[row : row + 1]), num_threads=1)[0]
        np.testing.assert_array_equal(alone[0], together[row])


def test_a_state_is_found_where_it_was_kept_and_begins_with_the_ends(tmp_path: Path) -> None:
    past = np.array([0, 1, 17, 32], np.int32)
    given = {"ends": normal(4, SIZE), **caches(), "query_starts": starts([1] * 4)}
    given |= {"past_lengths": past, "block_table": padded(BLOCKS)}
    path = save(tmp_path, "Recall", given, ["h", "c"], {}, **HEADS)
    # Each has one block more, for the token that is new.
    given["block_table"] = padded([[4], [0], [2, 1], [5, 3, 2]])
    h, c = run(path, given)
    np.testing.assert_array_equal(h[0], given["ends"][0])
    assert not c[0].any()
    for row in (1, 2, 3):
        keys, values = kept(BLOCKS[row], int(past[row]))
        np.testing.assert_array_equal(h[row], keys[-1])
        np.testing.assert_array_equal(c[row], values[-1])
    two = given | {"query_starts": np.array([0, 2, 2, 3, 4], np.int32)}
    with pytest.raises(Exception, match="several tokens of a sequence"):
        run(path, two)


def test_the_ends_are_the_last_of_one_half_and_the_first_of_the_other(tmp_path: Path) -> None:
    given = {"value_cache": caches()["value_cache"], "query_starts": starts([1] * 4)}
    given |= {"source_lengths": np.array(LENGTHS, np.int32), "source_table": padded(BLOCKS)}
    ends = run(save(tmp_path, "Ends", given, ["ends"], {}, **HEADS), given)[0]
    for row, (blocks, length) in enumerate(zip(BLOCKS, LENGTHS, strict=True)):
        values = kept(blocks, length)[1]
        half = SIZE // 2
        np.testing.assert_array_equal(ends[row], [*values[-1, :half], *values[0, half:]])


@pytest.mark.portable
def test_all_kernels_compute_the_same_bits(tmp_path: Path) -> None:
    graphs = [attend(tmp_path, [3, 0, 1], normal(3, SIZE))]
    for kind in KINDS:
        directory = tmp_path / kind
        directory.mkdir()
        given = {"input": normal(38, NUM_GATES[kind] * SIZE), "query_starts": starts([5, 33])}
        cell = {"kind": KINDS[kind], "size": SIZE, "backwards": 0}
        path = save(directory, "Recurrence", given, ["states"], weights(kind), **cell)
        graphs.append((path, given))
    for path, given in graphs:
        check_all_kernels_agree(path, given)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"source_lengths": [40]}, "longer than its blocks"),
        ({"source_lengths": [0]}, "nothing to look at"),
        ({"source_table": [[6]]}, "a block that isn't there"),
        ({"query_starts": [0, 2]}, "starts of sequences"),
        ({"q": normal(1, 16)}, "another width"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_an_error_not_a_crash(
    change: dict[str, Any], words: str, tmp_path: Path
) -> None:
    path, given = attend(tmp_path, [1], normal(1, SIZE))
    changed = {name: np.array(each, given[name].dtype) for name, each in change.items()}
    with pytest.raises(Exception, match=words):
        run(path, given | changed)


@pytest.mark.parametrize("cell", [{"kind": 3}, {"size": 40}, {"size": 0}], ids=str)
def test_a_cell_that_there_is_not_is_refused(cell: dict[str, int], tmp_path: Path) -> None:
    given = {"input": normal(1, SIZE)}
    path = save(tmp_path, "Update", given, ["h", "c"], {}, **{"kind": 0, "size": SIZE, **cell})
    with pytest.raises(Exception, match="no such cell"):
        run(path, given)
