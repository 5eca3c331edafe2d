"""One sequence that is being generated, or one beam of a search.

Knows: its request, its tokens, when it ends. Does not know: its slot, its neighbours, time.
"""

from dataclasses import dataclass, field

from quill.server.events import FinishReason
from quill.server.request import Request
from quill.server.sampling.beam_search import Search
from quill.server.sampling.penalties import Adjustments
from quill.server.sampling.randomness import sequence_seed
from quill.server.sampling.sampler import Draw


@dataclass(eq=False)
class Row:
    """One of a request's answers. Two rows are never equal, whatever they hold.

    The rows of a search take turns: which beam one holds changes from step to step.
    """

    request: Request
    sequence: int  # which of the request's answers, from 0
    seed: int
    max_tokens: int
    adjustments: Adjustments | None
    search: Search | None = None  # shared by all rows of its request
    beam: int = 0  # which of the search's beams it holds, from 0, the best
    token_ids: list[int] = field(default_factory=list)

    @property
    def num_cached(self) -> int:
        """Positions that its slot holds: all but the last token, which no step has read yet."""
        return len(self.request.prompt_ids) + len(self.token_ids) - 1

    @property
    def last_token(self) -> int:
        return self.token_ids[-1] if self.token_ids else self.request.prompt_ids[-1]

    def draw(self) -> Draw:
        """What the next token depends on."""
        return Draw(self.request.sampling, self.seed, len(self.token_ids), self.adjustments)

    def add(self, token: int) -> None:
        self.token_ids.append(token)
        if self.adjustments is not None:
            self.adjustments.add(token)

    def finish_reason(self) -> FinishReason | None:
        """Why it is complete; None while it isn't."""
        last = self.token_ids[-1] if self.token_ids else None
        if last in self.request.eos_ids:
            return "eos"
        if last in self.request.stop_ids:
            return "stop"
        return "length" if len(self.token_ids) >= self.max_tokens else None


def rows_of(request: Request, context: int) -> list[Row]:
    """A row for each answer, or for each beam. Prompt and answer together fit into the context."""
    max_tokens = min(request.max_new_tokens, context - len(request.prompt_ids))
    rows = [_row(request, sequence, max_tokens) for sequence in range(request.num_rows)]
    if request.beams is not None:
        search = Search(request, max_tokens)
        for beam, row in enumerate(rows):
            row.search, row.beam = search, beam
    return rows


def _row(request: Request, sequence: int, max_tokens: int) -> Row:
    adjustments = None
    if request.sampling.adjusts:
        adjustments = Adjustments(request.sampling, request.prompt_ids, max_tokens)
    return Row(request, sequence, sequence_seed(request.seed, sequence), max_tokens, adjustments)
