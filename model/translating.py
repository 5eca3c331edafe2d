"""How well a seq2seq model translates: BLEU and chrF, next to copying the source.

Knows: sacrebleu, both ways of decoding. Does not know: where pairs or models come from.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import sacrebleu

from model.beam import BeamParameters, beam_search
from model.dataset import pair_tokens
from model.display import Display
from model.reference import generate
from model.sampling import SamplingParameters
from model.splits import Pair
from model.tokenizer import Tokenizer
from model.transformer import Transformer

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


def make_translator(
    model: Transformer, tokenizer: Tokenizer, num_beams: int
) -> Callable[[str], str]:
    """A function from a source text to its translation; one beam is greedy."""
    special = pair_tokens(tokenizer.special)
    stop_ids = frozenset({special.eos})
    greedy = SamplingParameters(temperature=0.0, max_new_tokens=MAX_NEW_TOKENS, stop_ids=stop_ids)
    beams = BeamParameters(num_beams=num_beams, max_new_tokens=MAX_NEW_TOKENS, stop_ids=stop_ids)

    def translate(source: str) -> str:
        # A source that is too long is cut: a score needs an answer for every line.
        ids = [*tokenizer.encode(source)[: model.config.context - 1], special.eos]
        if num_beams == 1:
            answer = generate(model, [special.bos], greedy, source_ids=ids, cached=True).token_ids
        else:
            found = beam_search(model, [special.bos], beams, source_ids=ids, cached=True)
            answer = found[0].token_ids
        return tokenizer.decode(answer, skip_special=True)

    return translate


def translate_all(title: str, sources: Sequence[str], translate: Callable[[str], str]) -> list[str]:
    with Display(title, len(sources)) as display:
        answers = []
        for number, source in enumerate(sources, start=1):
            answers.append(translate(source))
            display.update(number, "")
    return answers


def evaluate_translation(
    model: Transformer, tokenizer: Tokenizer, pairs: Sequence[Pair], num_beams: int
) -> tuple[list[TranslationScore], list[str]]:
    """The scores of copying, greedy and beam search; and the greedy translations."""
    sources = [pair.source for pair in pairs]
    references = [pair.target for pair in pairs]
    greedy = translate_all("greedy", sources, make_translator(model, tokenizer, 1))
    scores = [
        score_translations("copy the source", sources, references),
        score_translations("greedy", greedy, references),
    ]
    if num_beams > 1:
        title = f"{num_beams} beams"
        found = translate_all(title, sources, make_translator(model, tokenizer, num_beams))
        scores.append(score_translations(title, found, references))
    return scores, greedy
