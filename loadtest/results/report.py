"""Writes the report of a run: one self-contained page, its plots, all records.

Knows: HTML, which plots there are. Does not know: how the load was made.
"""

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from html import escape
from pathlib import Path

from quill.loadtest.environment.server import write_samples
from quill.loadtest.results.plots import PLOTS, Plot, save
from quill.loadtest.results.slo import SHARE, RateTrial, best
from quill.loadtest.results.summary import (
    Run,
    Summary,
    by_scenario,
    scenario_table,
    server_usage,
    summarize,
    table,
)
from quill.loadtest.workload.records import write_records

PAGE = "report.html"
RECORDS = "requests.csv"
_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; margin: 1rem 0; }
th, td { border-bottom: 1px solid #ccc; padding: .25rem .75rem; text-align: right; }
th:first-child, td:first-child { text-align: left; white-space: nowrap; }
.info td { text-align: left; overflow-wrap: anywhere; }
img { max-width: 100%; height: auto; }
"""


def write_report(directory: Path, run: Run) -> Summary:
    """The page, the plots, requests.csv, server.csv and summary.json."""
    directory.mkdir(parents=True, exist_ok=True)
    write_records(directory / RECORDS, run.records)
    summary, scenarios = summarize(run.records, run.slo), by_scenario(run.records, run.slo)
    numbers = asdict(summary) | {"info": run.info, "verified": run.verified}
    numbers["scenarios"] = {name: asdict(each) for name, each in scenarios.items()}
    numbers["trials"] = [trial._asdict() for trial in run.trials]
    if usage := server_usage(run):
        numbers["server_usage"] = usage._asdict()
    (directory / "summary.json").write_text(json.dumps(numbers, indent=2), encoding="utf-8")
    if run.samples:
        write_samples(directory / "server.csv", run.samples)
    drawn = []
    for plot in PLOTS:
        if figure := plot.draw(run):
            save(figure, plot.title, directory / plot.file)
            drawn.append(plot)
        elif plot.missing:
            run.notes.append(plot.missing)
    (directory / PAGE).write_text(render(directory, run, summary, drawn), encoding="utf-8")
    return summary


def render(directory: Path, run: Run, summary: Summary, drawn: Sequence[Plot]) -> str:
    parts = ["<h1>Load test</h1>", info_table(run.info)]
    parts += [f"<p>{escape(text)}</p>" for text in sentences(run, summary)]
    parts.append(html_table(table(summary)))
    scenarios = by_scenario(run.records)
    if len(scenarios) > 1:
        note = "Milliseconds to the first token, between two tokens, and for a whole answer."
        parts += [f"<h2>By scenario</h2><p>{note}</p>", html_table(scenario_table(scenarios))]
    if run.trials:
        parts += ["<h2>By rate</h2>", html_table(trial_table(run.trials))]
    for plot in drawn:
        parts.append(f"<h2>{escape(plot.title)}</h2><p>{escape(plot.note)}</p>")
        parts.append(image(directory / plot.file, plot.title))
    parts += [f"<p>{escape(note)}</p>" for note in run.notes]
    parts.append(f"<p>Every request is in {RECORDS}, beside this page.</p>")
    return html_page("Load test", parts)


def html_page(title: str, parts: Sequence[str]) -> str:
    head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width">'
    head += f"<title>{escape(title)}</title><style>{_STYLE}</style>"
    body = "\n".join(parts)
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>{body}</body></html>\n'


def image(path: Path, title: str) -> str:
    """In the page itself."""
    data = base64.b64encode(path.read_bytes()).decode("ascii")
    return f'<img alt="{escape(title)}" src="data:image/png;base64,{data}">'


def sentences(run: Run, summary: Summary) -> list[str]:
    """The main results."""
    listed = [
        f"{summary.num_requests:,} requests in {summary.wall_s:.1f} s: "
        f"{summary.requests_per_s:.2f} requests/s, {summary.num_tokens:,} tokens, "
        f"{summary.tokens_per_s:.1f} tokens/s, {summary.prompt_tokens_per_s:.1f} prompt tokens/s.",
        f"Ended with: {_counts(summary.statuses)}. Finish reasons: "
        f"{_counts(summary.finish_reasons)}. Errors: {_counts(summary.errors)}.",
        f"{summary.cached_share:.0%} of the prompts' tokens came from the prefix cache.",
    ]
    if not run.trials and any(record.offered_rate for record in run.records):
        listed.append(
            f"While the load came, {summary.offered_per_s:.2f} requests/s were offered and "
            f"{summary.served_per_s:.2f} were served."
        )
    if usage := server_usage(run):
        listed.append(
            f"The server's processes kept {usage.busy_cores:.2f} cores busy on average"
            f"{' (with the pauses between rates)' if run.trials else ''}, and had "
            f"{usage.peak_mb:,.0f} MB of memory at most."
        )
    if run.slo and summary.slo_share is not None and summary.goodput is not None:
        listed.append(
            f"Service level {run.slo}: {summary.slo_share:.1%} of all requests were served well, "
            f"goodput {summary.goodput:.2f} requests/s."
        )
    if run.trials:
        listed.append(search_result(run.trials))
    if run.verified:
        listed.append(f"{run.verified}.")
    return listed


def search_result(trials: Sequence[RateTrial]) -> str:
    found = best(trials)
    if found is None:
        lowest = min(step.rate for step in trials)
        return f"No rate was carried, down to {lowest:g} requests/s."
    low, high = found.share_range
    return (
        f"The highest rate that was carried: {found.rate:g} requests/s offered, "
        f"{found.share:.1%} served well, goodput {found.goodput:.2f} requests/s. "
        f"{_margin(trials, found)} Of {found.num_requests:,} requests, {found.share:.1%} means "
        f"{low:.1%} to {high:.1%} in the long run (95% sure)"
        f"{'; a longer --duration narrows it' if low < SHARE else ''}."
    )


def _margin(trials: Sequence[RateTrial], found: RateTrial) -> str:
    """Between which two rates the limit lies."""
    bad = min((step.rate for step in trials if not step.is_carried), default=None)
    if bad is None:
        return "No rate failed: the limit lies higher."
    if bad < found.rate:
        return f"{bad:g} requests/s failed, though: near the limit chance decides."
    return f"{bad:g} requests/s failed: the limit is known to {bad / found.rate - 1:.0%}."


def trial_table(trials: Sequence[RateTrial]) -> list[list[str]]:
    """Header first."""
    rows = [["requests/s offered", "requests", "served well", "in the long run", "goodput"]]
    for step in sorted(trials):
        low, high = step.share_range
        shares = [f"{step.share:.1%}", f"{low:.1%} to {high:.1%}"]
        rows.append([f"{step.rate:g}", f"{step.num_requests:,}", *shares, f"{step.goodput:.2f}"])
    return rows


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{number:,} {name}" for name, number in counts.items()) or "none"


def info_table(info: Mapping[str, str]) -> str:
    rows = "".join(f"<tr><td>{escape(k)}</td><td>{escape(v)}</td></tr>" for k, v in info.items())
    return f'<table class="info">{rows}</table>'


def html_table(rows: Sequence[Sequence[str]]) -> str:
    head, *body = rows
    cells = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    lines = ["".join(f"<td>{escape(cell)}</td>" for cell in row) for row in body]
    return f"<table><tr>{cells}</tr>" + "".join(f"<tr>{line}</tr>" for line in lines) + "</table>"
