"""How much longer a tokenizer.json can make a text: its rules must not multiply memory.

Knows: the rules of the library `tokenizers` that insert text. Does not know: files, models.
"""

import base64
import json
import math
from collections.abc import Mapping
from typing import Any

MAX_GROWTH = 64  # times: XLM-RoBERTa's rules have 36, because one ligature stands for 18 characters


def read_checked(tokenizer_json: str) -> Any:
    """What a tokenizer.json has. ValueError: its normalizer or its decoder can make texts too long,
    or it can't be read."""
    try:
        tokenizer = json.loads(tokenizer_json)
        _check_growth(tokenizer)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    return tokenizer


def _check_growth(tokenizer: Mapping[str, Any]) -> None:
    for part in ("normalizer", "decoder"):
        try:
            growth = _growth(tokenizer.get(part) or {})
        except (AttributeError, TypeError) as error:
            raise ValueError(f"its {part} has a strange form: {error}") from error
        if growth > MAX_GROWTH:
            raise ValueError(
                f"the rules of its {part} can make a text {growth:.3g} times as long; at most "
                f"{MAX_GROWTH} times is allowed"
            )


def _growth(rule: Mapping[str, Any]) -> float:
    """By its keys: the library also reads rules without a type."""
    if "prepend" in rule:  # to each part between added tokens, which may be one character
        return 1.0 + len(rule["prepend"])
    if "precompiled_charsmap" in rule:
        return _longest_entry(base64.b64decode(rule["precompiled_charsmap"]))
    if "pattern" in rule and "content" in rule:
        num_inserted, num_matched = len(rule["content"]), len(rule["pattern"].get("String", ""))
        # A regular expression may match the empty text, before each character.
        return max(1.0, num_inserted / num_matched) if num_matched else 1.0 + num_inserted
    parts = (*rule.get("normalizers", ()), *rule.get("decoders", ()))
    return math.prod(map(_growth, parts), start=1.0)


def _longest_entry(charsmap: bytes) -> float:
    """SentencePiece's: the length of a trie, the trie, and the texts that it leads to."""
    texts = charsmap[4 + int.from_bytes(charsmap[:4], "little") :].split(b"\0")
    return max(1.0, *(float(len(each.decode())) for each in texts))
