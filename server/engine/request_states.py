"""The state of every request that hasn't ended: its times, its tokens, and that it ends once.

Knows: requests, rows, times that it is told. Does not know: blocks, steps, clocks.
"""

from dataclasses import dataclass, field

from quill.server.errors import RequestError
from quill.server.outputs import (
    FailEvent,
    FinishEvent,
    FinishReason,
    HypothesisEvent,
    PositionLogprobs,
    StartEvent,
    Timings,
    TokenEvent,
    Usage,
)
from quill.server.request import Request
from quill.server.sampling.beam_search import Beam
from quill.server.sampling.randomness import sequence_seed
from quill.server.scheduler.row import Row


@dataclass
class _State:
    request: Request
    arrived_s: float
    generated: dict[int, int]  # tokens of each sequence that hasn't ended
    started_s: float | None = None
    first_token_s: float | None = None
    cached: int = 0
    guesses: dict[int, tuple[int, int]] = field(default_factory=dict)  # and how many were right


class RequestStates:
    """One state for each request, from its arrival to its end."""

    def __init__(self) -> None:
        self._states: dict[str, _State] = {}

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._states

    def __len__(self) -> int:
        return len(self._states)

    def request_ids(self) -> list[str]:
        return list(self._states)

    def expired(self, now_s: float) -> list[str]:
        """Those whose deadline has passed."""
        return [
            request_id
            for request_id, state in self._states.items()
            if state.request.deadline_s is not None and state.request.deadline_s <= now_s
        ]

    def has_token(self, request_id: str) -> bool:
        return self._states[request_id].first_token_s is not None

    def first_moment(self, request_id: str) -> str:
        """When it has something to send, in words: of some requests all comes in the end."""
        request = self._states[request_id].request
        if request.pooling is not None:
            return "all texts were read"
        return "the first token" if request.beams is None else "the search was over"

    def open_sequences(self, request_id: str) -> list[int]:
        state = self._states.get(request_id)
        return [] if state is None else list(state.generated)

    def arrive(self, request: Request, now_s: float) -> None:
        assert request.request_id not in self._states, "request ids are unique"
        generated = dict.fromkeys(range(request.num_sequences), 0)
        self._states[request.request_id] = _State(request, now_s, generated)

    def start(self, request: Request, cached: int, now_s: float) -> StartEvent:
        state = self._states[request.request_id]
        state.started_s, state.cached = now_s, cached
        is_looked_up = request.source_ids is None and request.pooling is None
        return StartEvent(request.request_id, cached, is_looked_up)

    def token(
        self, row: Row, token: int, logprobs: PositionLogprobs | None, now_s: float
    ) -> TokenEvent:
        state = self._states[row.request.request_id]
        state.generated[row.sequence] += 1
        state.guesses[row.sequence] = row.num_draft_tokens, row.num_accepted
        if state.first_token_s is None:
            state.first_token_s = now_s
        return TokenEvent(row.request.request_id, row.sequence, token, logprobs)

    def hypothesis(
        self, request_id: str, sequence: int, beam: Beam, now_s: float
    ) -> HypothesisEvent:
        state = self._states[request_id]
        state.generated[sequence] = len(beam.token_ids)
        state.first_token_s = now_s
        return HypothesisEvent(request_id, sequence, beam.token_ids, beam.reports)

    def finish(
        self,
        request_id: str,
        sequence: int,
        reason: FinishReason,
        now_s: float,
        score: float | None = None,
    ) -> FinishEvent:
        """Ends a sequence, and with the last one the request."""
        state = self._states[request_id]
        generated = state.generated.pop(sequence)
        if not state.generated:
            del self._states[request_id]
        return FinishEvent(
            request_id,
            sequence,
            reason,
            seed=sequence_seed(state.request.seed, sequence),
            usage=Usage(
                state.request.num_prompt, state.cached, generated, *state.guesses.get(sequence, ())
            ),
            timings=_timings(state, now_s),
            score=score,
        )

    def fail(self, request_id: str, error: RequestError) -> FailEvent:
        """Ends the request and all its sequences."""
        del self._states[request_id]
        return FailEvent(request_id, error)


def _timings(state: _State, now_s: float) -> Timings:
    def since_arrival_ms(moment_s: float | None) -> float:
        return 0.0 if moment_s is None else 1000 * (moment_s - state.arrived_s)

    return Timings(
        queue_ms=since_arrival_ms(state.started_s),
        first_token_ms=since_arrival_ms(state.first_token_s),
        total_ms=since_arrival_ms(now_s),
    )
