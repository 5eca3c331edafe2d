"""How well a seq2seq model translates: BLEU and chrF, next to copying the source.

Knows: sacrebleu, both ways of decoding. Does not know: where pairs or models come from.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TextIO

import sacrebleu

from quill.model.data.dataset import pair_tokens
from quill.model.data.splits import Pair
from quill.model.data.tokenizer import Tokenizer
from quill.model.network.network import Network
from quill.model.progress import track
from quill.model.reference.beam_search import BeamParameters, beam_search
from quill.model.reference.generate import generate
from quill.model.reference.sampling import SamplingParameters

MAX_NEW_TOKENS = 128


@dataclass(frozen=True)
class TranslationScore:
    """Two corpus scores, each from 0 to 100."""

    name: str
    bleu: float
    chrf: float


def score_translations(
    name: str, hypotheses: Sequence[str], references: Sequence[str]
) -> TranslationScore:
    return TranslationScore(
        name,
        sacrebleu.corpus_bleu(hypotheses, [references]).score,
        sacrebleu.corpus_chrf(hypotheses, [references]).score,
    )


@dataclass(frozen=True)
class Translation:
    """What the decoder wrote, with its end, and how it reads."""

    token_ids: list[int]
    text: str


@dataclass(frozen=True)
class Evaluation:
    """The scores, and the translations of each way of decoding by its name."""

    scores: list[TranslationScore]
    translations: Mapping[str, list[Translation]]


class Translator:
    """Translates one text after another; one beam is greedy."""

    def __init__(self, model: Network, tokenizer: Tokenizer, num_beams: int) -> None:
        self.name = beams_name(num_beams)
        self._model = model
        self._tokenizer = tokenizer
        self._special = pair_tokens(tokenizer.special)
        stop_ids, max_new_tokens = frozenset({self._special.eos}), max_new(model.config.context)
        self._greedy = SamplingParameters(
            temperature=0.0, max_new_tokens=max_new_tokens, stop_ids=stop_ids
        )
        self._beams = BeamParameters(
            num_beams=num_beams, max_new_tokens=max_new_tokens, stop_ids=stop_ids
        )

    def translate(self, source: str) -> Translation:
        model, prompt, source_ids = self._model, [self._special.bos], self.source_ids(source)
        if self._beams.num_beams == 1:
            greedy = generate(model, prompt, self._greedy, source_ids=source_ids, cached=True)
            token_ids = list(greedy.token_ids)
        else:
            beams = beam_search(model, prompt, self._beams, source_ids=source_ids, cached=True)
            token_ids = list(beams[0].token_ids)
        return Translation(token_ids, self._tokenizer.decode(token_ids, skip_special=True))

    def source_ids(self, source: str) -> list[int]:
        """A source that is too long is cut: a score needs an answer for every line."""
        start = self._tokenizer.special.source_start
        max_length = self._model.config.context - 1 - len(start)
        return [*start, *self._tokenizer.encode(source)[:max_length], self._special.eos]


def beams_name(num_beams: int) -> str:
    return "greedy" if num_beams == 1 else f"{num_beams} beams"


def max_new(context: int) -> int:
    """The decoder's first token takes a place, too."""
    return min(MAX_NEW_TOKENS, context - 1)


def translate_all(translator: Translator, sources: Sequence[str]) -> list[Translation]:
    return [translator.translate(source) for source in track(sources, translator.name)]


def evaluate_translation(
    model: Network, tokenizer: Tokenizer, pairs: Sequence[Pair], num_beams: int
) -> Evaluation:
    """Copying, greedy and beam search."""
    sources = [pair.source for pair in pairs]
    references = [pair.target for pair in pairs]
    scores = [score_translations("copy the source", sources, references)]
    translations = {}
    for each in sorted({1, num_beams}):
        translator = Translator(model, tokenizer, each)
        found = translations[translator.name] = translate_all(translator, sources)
        scores.append(
            score_translations(translator.name, [answer.text for answer in found], references)
        )
    return Evaluation(scores, translations)


def write_answers(
    file: TextIO, model: Network, tokenizer: Tokenizer, pairs: Sequence[Pair], found: Evaluation
) -> None:
    """One line of JSON for each pair: `quill bench reference` sends the same to a server."""
    translator = Translator(model, tokenizer, 1)
    for number, pair in enumerate(pairs):
        line = {
            "source_ids": translator.source_ids(pair.source),
            "reference": pair.target,
            "max_new_tokens": max_new(model.config.context),
            "answers": {name: asdict(each[number]) for name, each in found.translations.items()},
        }
        print(json.dumps(line, ensure_ascii=False), file=file)
