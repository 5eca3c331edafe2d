"""Guesses how a text goes on, from what it said before.

Knows: one row's tokens, how often its guesses were right. Does not know: logits, other rows, time.

The longest stretch before the text's end that occurred earlier is looked up, and what followed it
there is the guess. A step checks it: the token at each place depends on logits, seed and position
alone, so a guess is right or wrong and never changes an answer.
"""

import math
from array import array
from collections.abc import Sequence

MAX_GUESSES = 8
GRAM = 3  # tokens that must have occurred together before
LONG = 6  # a match of so many tokens is trusted sooner
MAX_MATCH = 16
NUM_PLACES = 6  # earlier places that are looked at
LEARNING = 0.2
FIRST_RATES = (0.35, 0.7)  # of short and of long matches, before anything is known
RETRY = 32  # after so many guesses that didn't seem worth it, one is tried


class Guesses:
    """The text so far, indexed by its GRAM-grams, and how good guesses were."""

    def __init__(self, text: Sequence[int]) -> None:
        self._text = array("q", text)
        self._places: dict[int, int] = {}  # by a gram's hash: where it last ended
        self._rates = list(FIRST_RATES)
        self._is_long = False  # the last guess
        self._num_rests = 0
        # Most prompts are long, and this is done between two steps: 3 ms for 8,000 tokens.
        places, earlier = self._places, [0] * min(GRAM - 1, len(text))
        for end, gram in enumerate(zip(text, text[1:], text[2:], strict=False), GRAM):
            key = hash(gram)
            earlier.append(places.get(key, 0))
            places[key] = end
        self._earlier = array("q", earlier)  # for each place: where its gram ended before, or 0

    def add(self, token: int) -> None:
        self._text.append(token)
        key, end = hash(tuple(self._text[-GRAM:])), len(self._text)
        self._earlier.append(self._places.get(key, 0))
        self._places[key] = end

    def next(self, most: int, least_rate: float) -> list[int]:
        """At most so many tokens, each as likely right as `least_rate`."""
        place, length = self._longest_match()
        if not place or most <= 0:
            return []
        self._is_long = length >= LONG
        num = self._worth(self._rates[self._is_long], least_rate)
        if not num:
            self._num_rests += 1
            if self._num_rests < RETRY:
                return []
            self._num_rests, num = 0, 1
        following = self._text[place : place + min(num, most, MAX_GUESSES)].tolist()
        for i in range(len(following), min(num, most, MAX_GUESSES)):  # the text repeats itself
            following.append(following[i - (len(self._text) - place)])
        return following

    def learn(self, num_draft_tokens: int, num_right: int) -> None:
        """How the last guess was: those after the first wrong one say nothing."""
        rate = self._rates[self._is_long]
        for right in [1.0] * num_right + [0.0] * (num_right < num_draft_tokens):
            rate += LEARNING * (right - rate)
        self._rates[self._is_long] = rate

    def _worth(self, rate: float, least_rate: float) -> int:
        """The i-th guess is right if all before it are: rate ** i."""
        if rate < least_rate:
            return 0
        if least_rate <= 0 or rate >= 0.999:
            return MAX_GUESSES
        return int(math.log(least_rate) / math.log(rate))

    def _longest_match(self) -> tuple[int, int]:
        best = longest = 0
        place = self._earlier[-1] if self._earlier else 0
        for _ in range(NUM_PLACES):
            if not place or longest == MAX_MATCH:
                break
            length = self._match(place)
            if length > longest:
                best, longest = place, length
            place = self._earlier[place - 1]
        return best, longest

    def _match(self, place: int) -> int:
        """How many tokens before `place` are those before the text's end."""
        text, end, length = self._text, len(self._text), GRAM
        while length < min(place, MAX_MATCH) and text[place - length - 1] == text[end - length - 1]:
            length += 1
        return length
