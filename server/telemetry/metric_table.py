"""The metrics: one table, from which the registry and the list in server/docs/monitoring.md come.

Knows: names, labels, meanings. Does not know: when a metric changes.
`python -m quill.server.telemetry.metric_table` prints the list.
"""

from typing import Literal, NamedTuple

from quill.server.errors import REJECTION_REASONS

PROBLEMS = (
    "loading",
    "restarting",
    "hanging",
    "failing",
    "unread",
    "stopping",
)  # while health is NOT_SERVING


Merge = Literal["sum", "max", "min"]


class Row(NamedTuple):
    kind: Literal["counter", "gauge", "histogram", "summary"]
    name: str  # a counter's without `_total`
    labels: tuple[str, ...]
    help: str
    is_optional: bool = False  # exists only where it is watched
    merge: Merge | None = None  # how frontends' values become one; None: see merged_metrics.py


# fmt: off
TABLE = (
    Row("counter", "quill_requests", ("method", "outcome"),
        "calls, by the gRPC status that they ended with"),
    Row("counter", "quill_rejections", ("reason",),
        "calls rejected before the engine worked for them: " + ", ".join(REJECTION_REASONS)),
    Row("counter", "quill_cancellations", (), "calls that the client cancelled"),
    Row("counter", "quill_key_requests", ("key", "outcome"),
        "calls of an API key or client certificate, by the status that they ended with; "
        "the first --max-key-labels callers have their names, others are `other`"),
    Row("counter", "quill_key_tokens", ("key", "kind"),
        "`prompt` and `generated` tokens of a key's calls"),
    Row("counter", "quill_tokens", ("kind",),
        "`prompt`, `cached` (prompt tokens from the prefix cache) and `generated`, "
        "counted when a call ends"),
    Row("counter", "quill_generation_tokens", (), "tokens, counted as they are generated"),
    Row("counter", "quill_prefix_cache_hits", (), "prompts with a cached prefix"),
    Row("counter", "quill_prefix_cache_misses", (),
        "prompts without a cached prefix; sources to translate and texts to embed count "
        "as neither"),
    Row("counter", "quill_prefix_cache_dir_blocks", ("kind",),
        "KV blocks `read` from --prefix-cache-dir, `written` to it, `dropped` (not written: the "
        "disk was too slow or failed) and `damaged`"),
    Row("counter", "quill_prefix_cache_dir_bytes", ("kind",), "bytes `read` and `written` there"),
    Row("counter", "quill_preemptions", (),
        "requests preempted to free KV blocks, recomputed later"),
    Row("counter", "quill_spec_draft_tokens", (), "draft tokens of speculative decoding"),
    Row("counter", "quill_spec_accepted_tokens", (), "draft tokens that were accepted"),
    Row("counter", "quill_jump_forward_tokens", (),
        "tokens that a grammar determined, checked together with another token in "
        "one step"),
    Row("counter", "quill_grammar_cache_hits", (), "constraints that had compiled before"),
    Row("counter", "quill_grammar_cache_misses", (), "constraints that the worker compiled"),
    Row("counter", "quill_embeddings", (), "texts embedded"),
    Row("counter", "quill_engine_restarts", (),
        "ends of the engine's process that nobody asked for: it was started again",
        merge="max"),

    Row("gauge", "quill_serving", (), "1 while health is SERVING, else 0", merge="min"),
    Row("gauge", "quill_health_problem", ("problem",),
        "1 while it is why health is NOT_SERVING: " + ", ".join(PROBLEMS)),
    Row("gauge", "quill_requests_waiting", (),
        "requests in the queue, at the moment of the scrape", merge="sum"),
    Row("gauge", "quill_requests_running", (), "requests with a running sequence", merge="sum"),
    Row("gauge", "quill_sequences_running", (), "sequences that are running", merge="sum"),
    Row("gauge", "quill_max_num_seqs", (), "sequences that can run at once"),
    Row("gauge", "quill_max_queue", (), "requests that may wait (--max-queue)"),
    Row("gauge", "quill_kv_blocks", (),
        "blocks of the KV cache, 16 positions each; for an encoder: places for texts in "
        "a step"),
    Row("gauge", "quill_kv_blocks_used", (), "KV blocks of running sequences", merge="sum"),
    Row("gauge", "quill_kv_cache_usage", (), "share of the KV blocks in use, 0 to 1", merge="sum"),
    Row("gauge", "quill_prefix_cache_dir_used_bytes", (),
        "bytes of all blocks in --prefix-cache-dir, as of the last step", merge="sum"),
    Row("gauge", "quill_build_info", ("version", "python"),
        "1; the labels are the server's versions"),
    Row("gauge", "quill_model_info", ("model", "family", "precision", "device", "runtime"),
        "1; the labels are the model that serves now"),
    Row("gauge", "quill_certificate_expiry_timestamp_seconds", (),
        "when the certificate of --tls-cert expires, in Unix time", is_optional=True, merge="min"),
    Row("gauge", "quill_oldest_unread_call_seconds", (),
        "how long a stream waits until it is accepted, by a call of the server's own every second",
        is_optional=True),

    Row("histogram", "quill_time_to_first_token_seconds", (), "from arrival to the first token"),
    Row("histogram", "quill_inter_token_latency_seconds", (), "between two tokens of a sequence"),
    Row("histogram", "quill_queue_time_seconds", (), "from arrival to the first step"),
    Row("histogram", "quill_request_time_seconds", ("method",), "from arrival to the end"),
    Row("histogram", "quill_step_time_seconds", ("kind",),
        "the engine's steps, `decode`, `prefill` and `mixed`"),
    Row("histogram", "quill_mask_time_seconds", (),
        "all grammar masks of a step, computed while the model runs"),
    Row("histogram", "quill_grammar_compile_time_seconds", (),
        "a constraint in the grammar worker and its queue, rejected ones included"),
    Row("summary", "quill_engine_call_seconds", ("outcome",),
        "calls that the engine worked for, from arrival to end"),
)
# fmt: on


def written(row: Row) -> str:
    """As Prometheus and the page write it."""
    name = f"{row.name}_total" if row.kind == "counter" else row.name
    return f"{name}{{{','.join(row.labels)}}}" if row.labels else name


def page_table() -> str:
    rows = [f"| `{written(row)}` | {row.kind} | {row.help} |" for row in TABLE]
    return "\n".join(["| name | kind | what |", "|---|---|---|", *rows]) + "\n"


if __name__ == "__main__":
    print(page_table(), end="")
