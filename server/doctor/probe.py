"""Sequences that compute fixed tokens by a bundle's graphs: alone and batched, whole and chunked.

Knows: a Session, blocks. Does not know: what the results are compared with, time.

An encoder's texts have hidden states in the place of logits, and are computed whole.
"""

import random
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from quill.export.bundle import graph_contract
from quill.server.engine.model_runner import Chunk, Session, Source
from quill.server.loading.engine_factory import Bundle, open_session
from quill.server.request import Limits, encoder_limits
from quill.server.text.tokenizer import Text

# L tokens whose results are wanted · V vocabulary, or the model's size for an encoder

Results = npt.NDArray[np.float32]  # (L, V)

BATCH_SIZES = (1, 2, 3, 8, 32)
NUM_SLOTS = BATCH_SIZES[-1]
MAX_LONG = 560  # tokens of slot 0, and of the others
MAX_SHORT = 128
MAX_PROMPT = 300  # that is chunked: longer than a block of CUDA's
MAX_SOURCE = 24
MAX_CHUNK = 40
MAX_OTHERS = 4  # sequences in the step of a chunk
NUM_CUTS = 3
WANTED_STEP = 7  # of so many tokens of a prompt one's results are compared
TEXT = (
    "Four score and seven years ago our fathers brought forth on this continent, a new nation, "
    "conceived in Liberty, and dedicated to the proposition that all men are created equal. Now we "
    "are engaged in a great civil war, testing whether that nation, or any nation so conceived and "
    "so dedicated, can long endure. We are met on a great battle-field of that war. We have come "
    "to dedicate a portion of that field, as a final resting place for those who here gave their "
    "lives that that nation might live. It is altogether fitting and proper that we should do this."
)


class Part(NamedTuple):
    """New tokens of a slot in a step, and the indices of those whose results are wanted."""

    slot: int
    start: int
    ids: Sequence[int]
    wanted: Sequence[int] = (-1,)


class Probe:
    def __init__(self, bundle: Bundle, num_threads: int, spinning: bool = True) -> None:
        self.graphs, self._sizes = bundle.graphs, bundle.manifest.sizes
        self.long = min(MAX_LONG, self._sizes.context)
        self.short = min(MAX_SHORT, self._sizes.context)
        self.text = _ids(bundle, self.long)
        self._block_size = graph_contract.block_size(self.graphs.device)
        self._session: Session = open_session(bundle, self._limits(), num_threads, spinning)
        if self.graphs.encoder is not None and not self.is_encoder:
            self._session.encode([self._source(slot) for slot in range(NUM_SLOTS)])

    @property
    def is_encoder(self) -> bool:
        return self.graphs.decoder is None

    def compute(self, parts: Sequence[Part]) -> Results:
        """What is wanted of all parts, one after another."""
        if not self.graphs.one_token_steps:
            return self._step(parts)
        found = []
        for part in parts:
            wanted = {index % len(part.ids) for index in part.wanted}
            for index, token in enumerate(part.ids):
                at = [0] if index in wanted else []
                found.append(self._step([Part(part.slot, part.start + index, [token], at)]))
        return np.concatenate(found)

    def whole(self, num_tokens: int) -> Results:
        """A prompt in one step."""
        num = min(num_tokens, self.long)
        return self.compute([Part(0, 0, self.text[:num], _wanted(0, num, num))])

    def chunked(self, num_tokens: int) -> Results:
        """The same prompt, cut at random, in steps with other sequences; several times, each time
        another way."""
        num, chance = min(num_tokens, self.long), random.Random(0)
        found = []
        for _ in range(NUM_CUTS):
            start = 0
            while start < num:
                size = 1 if chance.random() < 1 / 3 else chance.randint(1, MAX_CHUNK)
                stop = min(start + size, num)
                part = Part(0, start, self.text[start:stop], _wanted(start, stop, num))
                found.append(self._among_others(part, chance))
                start = stop
        return np.concatenate(found)

    def decoded(self, num_tokens: int, num_prefilled: int) -> Results:
        """The same prompt, whose last tokens come one by one."""
        num, start = min(num_tokens, self.long), min(num_prefilled, num_tokens, self.long)
        found = [self.compute([Part(0, 0, self.text[:start], _wanted(0, start, num))])]
        for at in range(start, num):
            wanted = _wanted(at, at + 1, num)
            found.append(self.compute([Part(0, at, self.text[at : at + 1], wanted)]))
        return np.concatenate(found)

    def batched(self) -> Iterator[tuple[int, Results, Results]]:
        """The last tokens of sequences whose others were computed one sequence after another: how
        many in a batch, the first and the last so many, and the same of a batch of all."""
        if not self.is_encoder:
            for slot in range(NUM_SLOTS):
                self.compute([Part(slot, 0, self._prompt(slot)[:-1], ())])
        together = self._last_tokens(0, NUM_SLOTS)
        for num in BATCH_SIZES[:-1]:
            last = NUM_SLOTS - num
            found = [self._last_tokens(first, num) for first in (0, last)]
            yield num, np.concatenate(found), np.concatenate([together[:num], together[last:]])

    def prefill(self, num_tokens: int) -> None:
        self.compute([Part(0, 0, self.text[:num_tokens])])

    def decode(self, num_sequences: int, past: int) -> None:
        """A step of some sequences after so many tokens each, whatever these were."""
        self.compute([Part(slot, past, [self.text[slot % past]]) for slot in range(num_sequences)])

    def _last_tokens(self, first: int, num: int) -> Results:
        return self.compute([self._last(slot) for slot in range(first, first + num)])

    def _last(self, slot: int) -> Part:
        ids = self._prompt(slot)
        return Part(slot, 0, ids) if self.is_encoder else Part(slot, len(ids) - 1, ids[-1:])

    def _prompt(self, slot: int) -> list[int]:
        """All of different lengths, where the context allows it."""
        start = slot % max(1, len(self.text) // 2)
        return self.text[start : start + min(3 + 2 * slot, self.short)]

    def _among_others(self, part: Part, chance: random.Random) -> Results:
        parts = [part]
        if not self.graphs.one_token_steps:
            for slot in chance.sample(range(1, NUM_SLOTS), chance.randint(0, MAX_OTHERS)):
                other = Part(slot, 0, self._prompt(slot), ())
                parts.insert(chance.randint(0, len(parts)), other)
        return self.compute(parts)

    def _step(self, parts: Sequence[Part]) -> Results:
        output = self._session.step([self._chunk(part) for part in parts])
        return np.array(output.hidden_MD if self.is_encoder else output.logits_LV)

    def _chunk(self, part: Part) -> Chunk:
        wanted = sorted(index % len(part.ids) for index in part.wanted)
        if self.is_encoder:
            return Chunk(part.ids, 0, (), (), hidden_at=wanted)
        blocks = self._blocks(part.slot, part.start + len(part.ids))
        chunk = Chunk(part.ids, part.start, blocks, wanted)
        if self.graphs.encoder is None:
            return chunk
        source = self._source(part.slot)
        return chunk._replace(source_blocks=source.blocks, source_length=len(source.ids))

    def _source(self, slot: int) -> Source:
        num = min(MAX_SOURCE, self._sizes.context)
        first = self._first_block(NUM_SLOTS) + slot * self._num_blocks(num)
        return Source(self.text[:num], range(first, first + self._num_blocks(num)))

    def _blocks(self, slot: int, num_tokens: int) -> range:
        first = self._first_block(slot)
        return range(first, first + self._num_blocks(num_tokens))

    def _first_block(self, slot: int) -> int:
        long, short = self._num_blocks(self.long), self._num_blocks(self.short)
        return 0 if slot == 0 else long + (slot - 1) * short

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_size)

    def _limits(self) -> Limits:
        context = self._sizes.context
        if self.is_encoder:
            return encoder_limits(max_num_seqs=NUM_SLOTS, context=context)
        num_blocks = self._first_block(NUM_SLOTS)
        if self.graphs.encoder is not None:
            num_blocks += NUM_SLOTS * self._num_blocks(min(MAX_SOURCE, context))
        return Limits(
            max_num_seqs=NUM_SLOTS,
            context=context,
            num_blocks=num_blocks,
            block_size=self._block_size,
            one_token_steps=self.graphs.one_token_steps,
        )


def _wanted(start: int, stop: int, num: int) -> list[int]:
    """Of the tokens from `start` to `stop` of a prompt of `num`, as indices into these."""
    return [at - start for at in range(start, stop) if at % WANTED_STEP == 0 or at == num - 1]


def _ids(bundle: Bundle, num_tokens: int) -> list[int]:
    """Of a text, or any where the model has no tokenizer."""
    name, vocab_size = bundle.manifest.tokenizer, bundle.manifest.sizes.vocab_size
    if name is None:
        chance = random.Random(0)
        return [chance.randrange(vocab_size) for _ in range(num_tokens)]
    ids = [token % vocab_size for token in Text.load(bundle.directory / name, None).encode(TEXT)]
    return (ids * -(-num_tokens // len(ids)))[:num_tokens]
