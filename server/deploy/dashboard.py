"""Writes Grafana's dashboard from one table of panels.

    python server/deploy/dashboard.py > server/deploy/kubernetes/monitoring/dashboard.json

Knows: Quill's metrics, Grafana's names. Does not know: Kubernetes, how the file is deployed.
"""

import json
from typing import Any

WIDTH = 24  # columns of Grafana's grid
OWN = '{job="quill", pod=~"$pod"}'
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
Json = dict[str, Any]
Query = tuple[str, str]  # expression, legend


def total(metric: str, legend: str = "") -> Query:
    return f"sum({metric}{OWN})", legend


def rate(metric: str) -> str:
    return f"rate({metric}{OWN}[$__rate_interval])"


def by(label: str, metric: str, legend: str = "") -> Query:
    return f"sum by ({label}) ({rate(metric)})", legend or f"{{{{{label}}}}}"


def quantile(share: float, metric: str, legend: str, label: str = "") -> Query:
    grouped = f"le, {label}" if label else "le"
    summed = f"sum by ({grouped}) ({rate(f'{metric}_bucket')})"
    return f"histogram_quantile({share:g}, {summed})", legend


def quantiles(metric: str) -> list[Query]:
    shares = {"median": 0.5, "95%": 0.95, "99%": 0.99}
    return [quantile(share, metric, legend) for legend, share in shares.items()]


def rows() -> list[tuple[str, int, list[tuple[str, str, str, list[Query]]]]]:
    """Panel type and height of a row; title, description, unit and queries of its panels."""
    hits, misses = (rate(f"quill_prefix_cache_{each}_total") for each in ("hits", "misses"))
    accepted, drafted = (
        f"sum({rate(f'quill_spec_{each}_tokens_total')})" for each in ("accepted", "draft")
    )
    pod, made = "{{pod}}", "quill_generation_tokens_total"
    return [
        ("stat", 4, [
            ("Servers", "", "short",
             [total("quill_serving", "serving"), (f"count(quill_serving{OWN})", "scraped")]),
            ("Generated tokens per second", "", "short", [(f"sum({rate(made)})", "")]),
            ("Running sequences", "", "short",
             [total("quill_sequences_running", "running"), total("quill_max_num_seqs", "limit")]),
            ("Waiting requests", "", "short", [total("quill_requests_waiting")]),
        ]),
        ("stacked", 7, [
            ("Generated tokens per second, by server", "", "short", [(rate(made), pod)]),
            ("Running sequences, by server", "", "short", [(f"quill_sequences_running{OWN}", pod)]),
            ("Waiting requests, by server", "", "short", [(f"quill_requests_waiting{OWN}", pod)]),
        ]),
        ("timeseries", 7, [
            ("Time to first token", "From arrival, over all servers.", "s",
             quantiles("quill_time_to_first_token_seconds")),
            ("Inter-token latency", "Of one sequence, over all servers.", "s",
             quantiles("quill_inter_token_latency_seconds")),
            ("Queue time", "From arrival to the first step, over all servers.", "s",
             quantiles("quill_queue_time_seconds")),
        ]),
        ("timeseries", 7, [
            ("KV cache usage", "Blocks of running sequences.", "percentunit",
             [(f"quill_kv_cache_usage{OWN}", pod)]),
            ("Prefix cache hit rate", "Prompts with a cached prefix.", "percentunit",
             [(f"{hits} / ({hits} + {misses})", pod)]),
            ("Draft acceptance rate", "Speculative decoding.", "percentunit",
             [(f"{accepted} / {drafted}", "accepted")]),
        ]),
        ("timeseries", 7, [
            ("Calls, by outcome", "", "reqps", [by("outcome", "quill_requests_total")]),
            ("Tokens of finished calls", "cached: prompt tokens from the prefix cache.", "short",
             [by("kind", "quill_tokens_total")]),
            ("Embeddings per second", "", "short", [by("pod", "quill_embeddings_total")]),
        ]),
        ("timeseries", 7, [
            ("Engine step, 95%", "", "s",
             [quantile(0.95, "quill_step_time_seconds", "{{kind}}", "kind")]),
            ("Whole call, 95%", "", "s",
             [quantile(0.95, "quill_request_time_seconds", "{{method}}", "method")]),
            ("Preemptions and cancellations", "", "short",
             [by("pod", "quill_preemptions_total", "preempted {{pod}}"),
              by("pod", "quill_cancellations_total", "cancelled {{pod}}")]),
        ]),
    ]  # fmt: skip


def panels() -> list[Json]:
    made: list[Json] = []
    y = 0
    for kind, height, row in rows():
        width = WIDTH // len(row)
        for column, (title, description, unit, queries) in enumerate(row):
            defaults: Json = {"unit": unit, "min": 0}
            if unit == "percentunit":
                defaults["max"] = 1
            if kind == "stacked" or unit == "reqps":
                defaults["custom"] = {"stacking": {"mode": "normal"}, "fillOpacity": 20}
            panel = {
                "id": len(made) + 1,
                "type": "timeseries" if kind == "stacked" else kind,
                "title": title,
                "description": description,
                "datasource": SOURCE,
                "gridPos": {"x": column * width, "y": y, "w": width, "h": height},
                "fieldConfig": {"defaults": defaults, "overrides": []},
                "options": {},
                "targets": [
                    {"refId": chr(65 + number), "datasource": SOURCE, "expr": expr,
                     "legendFormat": legend}
                    for number, (expr, legend) in enumerate(queries)
                ],
            }  # fmt: skip
            made.append(panel)
        y += height
    return made


def dashboard() -> Json:
    servers = 'label_values(quill_serving{job="quill"}, pod)'
    source = {"name": "datasource", "type": "datasource", "query": "prometheus",
              "label": "Prometheus"}  # fmt: skip
    pod = {
        "name": "pod", "type": "query", "label": "Server", "datasource": SOURCE,
        "query": {"query": servers, "refId": "pod"}, "definition": servers, "refresh": 2,
        "includeAll": True, "multi": True, "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
    }  # fmt: skip
    return {
        "title": "Quill", "uid": "quill", "tags": ["quill"], "schemaVersion": 39, "version": 1,
        "editable": True, "refresh": "15s", "time": {"from": "now-1h", "to": "now"},
        "timezone": "", "templating": {"list": [source, pod]}, "annotations": {"list": []},
        "panels": panels(),
    }  # fmt: skip


def write() -> str:
    """One line for each panel."""
    content = dashboard()
    last = ",\n  ".join(json.dumps(panel) for panel in content.pop("panels"))
    lines = [f" {json.dumps(name)}: {json.dumps(value)}" for name, value in content.items()]
    return "{\n" + ",\n".join([*lines, f' "panels": [\n  {last}\n ]']) + "\n}\n"


if __name__ == "__main__":
    print(write(), end="")
