"""A session with no model: its blocks hold token ids, its logits are a function of them.

So whatever the engine does with blocks must leave each row with exactly its own text, or the row's
tokens change.
"""

import zlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from quill.model.randomness import sequence_seed, uniform
from quill.model.reference.sampling import SamplingParameters, choose
from quill.server.engine.model_runner import BlockCopy, Chunk, ModelOutput, Source
from quill.server.request import Request

VOCAB_SIZE = 50
D_MODEL = 6
NOTHING = -1  # what a position holds before it is written

Logits = npt.NDArray[np.float32]


def logits_after(ids: Sequence[int]) -> Logits:
    """The 'model': logits that depend on every token of a text and on their order.

    It likes to go round in circles, so that guesses are right now and then.
    """
    seed = zlib.crc32(np.array(ids, np.int64).tobytes())
    logits_V = (np.random.default_rng(seed).normal(size=VOCAB_SIZE) * 3).astype(np.float32)
    if seed % 8:
        logits_V[(ids[-1] * 7 + 3) % 12] += 9
    return logits_V


def hidden_after(ids: Sequence[int]) -> Logits:
    """The 'model': a hidden state that depends on every token of a text and on their order."""
    seed = zlib.crc32(np.array(ids, np.int64).tobytes()) + 1
    return np.random.default_rng(seed).normal(size=D_MODEL).astype(np.float32)


class FakeSession:
    """Fails on demand: put an error into `failures`, and the next step raises it."""

    def __init__(self, num_blocks: int, block_size: int = 16) -> None:
        self._ids_NP = np.full((num_blocks, block_size), NOTHING)
        self._size = block_size
        self.failures: list[Exception] = []
        self.copy_failures: list[Exception] = []
        self.poisoned: set[int] = set()  # chunks of steps whose logits aren't finite
        self.steps: list[list[tuple[int, int]]] = []  # of each chunk: start and stop
        self.num_encoded: list[int] = []  # sources of each run of the encoder
        self.num_copied = 0

    def step(self, chunks: Sequence[Chunk]) -> ModelOutput:
        self._maybe_fail()
        assert chunks
        self._check_blocks(chunks)
        self.steps.append([(chunk.start, chunk.start + len(chunk.ids)) for chunk in chunks])
        for chunk in chunks:
            self._write(chunk.blocks, chunk.ids, chunk.start)
        logits = [
            logits_after(self._text(chunk, chunk.start + i + 1)) * (np.nan if bad else 1)
            for bad, chunk in ((place in self.poisoned, each) for place, each in enumerate(chunks))
            for i in chunk.logits_at
        ]
        hidden = [
            hidden_after(self._text(chunk, chunk.start + i + 1))
            * (np.nan if place in self.poisoned else 1)
            for place, chunk in enumerate(chunks)
            for i in chunk.hidden_at
        ]
        return ModelOutput(
            np.array(logits, np.float32).reshape(len(logits), VOCAB_SIZE),
            np.array(hidden, np.float32).reshape(len(hidden), D_MODEL),
        )

    def encode(self, sources: Sequence[Source]) -> None:
        self._maybe_fail()
        self.num_encoded.append(len(sources))
        for source in sources:
            self._write(source.blocks, source.ids, 0)

    def copy(self, copies: Sequence[BlockCopy]) -> None:
        if self.copy_failures:
            raise self.copy_failures.pop(0)
        targets = [copy.target for copy in copies]
        assert len(set(targets)) == len(targets)
        assert not set(targets) & {copy.source for copy in copies}
        for source, target in copies:
            self._ids_NP[target] = self._ids_NP[source]
        self.num_copied += len(copies)

    def _write(self, blocks: Sequence[int], ids: Sequence[int], start: int) -> None:
        for position, token in enumerate(ids, start):
            self._ids_NP[blocks[position // self._size], position % self._size] = token

    def _text(self, chunk: Chunk, length: int) -> list[int]:
        """All that the chunk's last token looks at: the source, if there is one, and its text."""
        text = self._ids_NP[list(chunk.blocks)].ravel()[:length].tolist()
        source = self._ids_NP[list(chunk.source_blocks)].ravel()[: chunk.source_length].tolist()
        assert len(text) == length
        assert len(source) == chunk.source_length
        assert NOTHING not in text + source
        return [*source, *text]

    def _check_blocks(self, chunks: Sequence[Chunk]) -> None:
        """What one chunk writes, no other looks at."""
        seen, written = list[set[int]](), list[set[int]]()
        for chunk in chunks:
            assert chunk.ids
            assert list(chunk.logits_at) == sorted(
                set(chunk.logits_at) & set(range(len(chunk.ids)))
            )
            stop = -(-(chunk.start + len(chunk.ids)) // self._size)
            written.append(set(chunk.blocks[chunk.start // self._size : stop]))
            seen.append({*chunk.blocks[:stop], *chunk.source_blocks})
            assert not written[-1] & set(chunk.source_blocks)
        for place, blocks in enumerate(written):
            assert not any(blocks & other for i, other in enumerate(seen) if i != place)

    def _maybe_fail(self) -> None:
        if self.failures:
            raise self.failures.pop(0)


class FakeEncoder(FakeSession):
    """Every token sees its whole text, so a text comes whole; and nothing is kept."""

    def step(self, chunks: Sequence[Chunk]) -> ModelOutput:
        self._maybe_fail()
        assert chunks
        assert all(chunk.start == 0 for chunk in chunks)
        self.steps.append([(0, len(chunk.ids)) for chunk in chunks])
        logits = [logits_after([*chunk.ids, i]) for chunk in chunks for i in chunk.logits_at]
        hidden = [hidden_after([*chunk.ids, i]) for chunk in chunks for i in chunk.hidden_at]
        return ModelOutput(
            np.array(logits, np.float32).reshape(len(logits), VOCAB_SIZE),
            np.array(hidden, np.float32).reshape(len(hidden), D_MODEL),
        )


def oracle(request: Request, context: int) -> list[list[int]]:
    """Each sequence of the answer, by the reference's rules, one token after another."""
    return [
        _sequence(request, sequence_seed(request.seed, index), context)
        for index in range(request.num_sequences)
    ]


def _sequence(request: Request, seed: int, context: int) -> list[int]:
    least = request.min_new_tokens if request.constraint is None else 0
    parameters = SamplingParameters(
        **vars(request.sampling), stop_ids=request.all_stop_ids, min_new_tokens=least
    )
    prompt, answer = list(request.prompt_ids), list[int]()
    for position in range(min(request.max_new_tokens, context - len(prompt))):
        logits_V = logits_after([*(request.source_ids or ()), *prompt, *answer])
        u, mask_V = uniform(seed, position), _mask(request, answer)
        answer.append(choose(logits_V, parameters, prompt, answer, u, mask_V))
        if answer[-1] in request.all_stop_ids:
            break
    return answer


def _mask(request: Request, answer: Sequence[int]) -> npt.NDArray[np.bool_] | None:
    """By a matcher that has seen the answer's tokens and nothing else."""
    if request.constraint is None:
        return None
    from tests.server.small_grammars import small_compiler

    matcher = small_compiler().compile_now(request.constraint).matcher()
    for token in answer:
        matcher.accept(token)
    (mask,) = matcher.masks((), request.all_stop_ids, request.min_new_tokens - len(answer))
    assert not matcher.has_failed
    bits = np.unpackbits(mask.view(np.uint8), count=VOCAB_SIZE, bitorder="little")
    return bits.astype(np.bool_)
