"""What the differences between two looks say, of one server and of all.

Knows: the metrics' names. Does not know: how they were fetched, how they are shown.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

from quill.server.client.top.page import Look

Buckets = Mapping[float, float]  # observations up to each bound


@dataclass(frozen=True, kw_only=True)
class Numbers:
    """Counts are of the time between the looks; running, waiting, held and so on of the last."""

    serving: float = 0.0  # how many servers
    running: float = 0.0
    max_num_seqs: float = 0.0
    waiting: float = 0.0
    tokens_per_s: float = 0.0
    held: float = 0.0
    blocks: float = 0.0
    hits: float = 0.0
    misses: float = 0.0
    draft: float = 0.0
    accepted: float = 0.0
    first_token: Buckets
    gap: Buckets


def numbers(now: Look, recent: Look | None, old: Look | None) -> Numbers:
    """`recent` is for rates, `old` for shares and quantiles. None: since the server began."""
    seconds = 0.0 if recent is None else now.at_s - recent.at_s
    made = "quill_generation_tokens_total"

    def since(name: str, *label: tuple[str, str]) -> float:
        return now.value(name, *label) - (0.0 if old is None else old.value(name, *label))

    def observed(name: str) -> Buckets:
        before = {} if old is None else old.buckets(name)
        return {bound: n - before.get(bound, 0.0) for bound, n in now.buckets(name).items()}

    return Numbers(
        serving=now.value("quill_serving"),
        running=now.value("quill_sequences_running"),
        max_num_seqs=now.value("quill_max_num_seqs"),
        waiting=now.value("quill_requests_waiting"),
        tokens_per_s=(
            (now.value(made) - recent.value(made)) / seconds if recent and seconds > 0 else 0.0
        ),
        held=now.value("quill_kv_blocks_used"),
        blocks=now.value("quill_kv_blocks"),
        hits=since("quill_prefix_cache_hits_total"),
        misses=since("quill_prefix_cache_misses_total"),
        draft=since("quill_spec_draft_tokens_total"),
        accepted=since("quill_spec_accepted_tokens_total"),
        first_token=observed("quill_time_to_first_token_seconds"),
        gap=observed("quill_inter_token_latency_seconds"),
    )


def total(each: Sequence[Numbers]) -> Numbers:
    plain = [field.name for field in fields(Numbers) if field.name not in ("first_token", "gap")]
    sums = {name: sum(getattr(one, name) for one in each) for name in plain}
    return Numbers(
        **sums,
        first_token=_added([one.first_token for one in each]),
        gap=_added([one.gap for one in each]),
    )


def _added(each: Sequence[Buckets]) -> Buckets:
    bounds = sorted({bound for one in each for bound in one})
    return {bound: sum(one.get(bound, 0.0) for one in each) for bound in bounds}


def quantile(buckets: Buckets, q: float) -> float | None:
    """Within a bucket as if its observations lay evenly. None: there were none."""
    bounds = list(buckets)
    if not bounds or buckets[bounds[-1]] <= 0:
        return None
    wanted = q * buckets[bounds[-1]]
    below, least = 0.0, 0.0
    for bound in bounds[:-1]:
        if buckets[bound] >= wanted:
            return least + (wanted - below) / (buckets[bound] - below) * (bound - least)
        below, least = buckets[bound], bound
    return least  # beyond the last bound


def share(part: float, rest: float) -> float | None:
    return part / (part + rest) if part + rest > 0 else None
