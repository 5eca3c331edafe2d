// The server's own numbers as they move.
// Knows: the metrics' names, differences between two looks. Does not know: how they are fetched.

import { duration } from "./answer.js";
import { byId, drawn, make } from "./elements.js";

const NUM_POINTS = 120;
const WINDOW_S = 60; // quantiles and shares are of the last minute
const RATE_S = 5; // rates of the last seconds

const CARDS = [
  {
    title: "Running and waiting",
    lines: (now) => [now.value("quill_sequences_running"), now.value("quill_requests_waiting")],
    says: ([running, waiting], now) => [`${running} / ${waiting}`, `at most ${now.value("quill_max_num_seqs")} run at once`],
    names: ["running", "waiting"],
  },
  {
    title: "Tokens a second",
    lines: (now, before) => [rate(now, before(RATE_S), "quill_generation_tokens")],
    says: ([each], now) => [each.toFixed(each < 10 ? 1 : 0), `${count(now.value("quill_generation_tokens"))} since the start`],
  },
  timed("Time to first token", "quill_time_to_first_token_seconds"),
  timed("Inter-token latency", "quill_inter_token_latency_seconds"),
  timed("Queue time", "quill_queue_time_seconds"),
  timed("Engine step time", "quill_step_time_seconds"),
  {
    title: "KV cache",
    lines: (now) => [share(now.value("quill_kv_blocks_used"), now.value("quill_kv_blocks"))],
    says: ([used], now) => [percent(used), `${count(now.value("quill_kv_blocks_used"))} of ${count(now.value("quill_kv_blocks"))} blocks used`],
    most: 1,
  },
  {
    title: "Prefix cache",
    lines: (now, before) => [hits(now, before(WINDOW_S))],
    says: ([found], now) => [percent(found), `${count(now.value("quill_tokens", "cached"))} of ${count(now.value("quill_tokens", "prompt"))} prompt tokens cached`],
    most: 1,
  },
  {
    title: "Draft tokens accepted (speculative decoding)",
    lines: (now, before) => [accepted(now, before(WINDOW_S))],
    says: ([rate], now) => [percent(rate), `${count(now.value("quill_spec_accepted_tokens"))} draft tokens accepted since the start`],
    most: 1,
  },
];

function timed(title, name) {
  return {
    title,
    lines: (now, before) => [0.5, 0.95].map((q) => quantile(now.histogram(name), before(WINDOW_S).histogram(name), q)),
    says: (both, now) => [
      both[0] === undefined ? "–" : both.map((each) => duration(1000 * each)).join(" / "),
      `about, in the last minute; ${count(now.histogram(name).count)} since the start`,
    ],
    names: ["median", "95%"],
  };
}

// What the server said at one moment.
class Look {
  constructor({ time_s, metrics }) {
    this.time_s = time_s;
    this.metrics = metrics;
  }

  // Of all labels together, or of one.
  value(name, label) {
    const fitting = (this.metrics[name] ?? []).filter((one) => !label || Object.values(one.labels).includes(label));
    return fitting.reduce((sum, one) => sum + one.value, 0);
  }

  histogram(name) {
    const all = this.metrics[name] ?? [];
    const counts = new Map();
    for (const [bound, number] of all.flatMap((one) => one.buckets)) counts.set(bound, (counts.get(bound) ?? 0) + number);
    return { counts, count: all.reduce((sum, one) => sum + one.count, 0) };
  }
}

function rate(now, then, name) {
  const time_s = now.time_s - then.time_s;
  return time_s > 0 ? (now.value(name) - then.value(name)) / time_s : 0;
}

function share(part, whole) {
  return whole > 0 ? part / whole : undefined;
}

function hits(now, then) {
  const since = (name) => now.value(name) - then.value(name);
  const found = since("quill_prefix_cache_hits");
  return share(found, found + since("quill_prefix_cache_misses"));
}

function accepted(now, then) {
  const since = (name) => now.value(name) - then.value(name);
  return share(since("quill_spec_accepted_tokens"), since("quill_spec_draft_tokens"));
}

// Within a bucket as if its observations lay evenly.
function quantile(now, then, q) {
  const total = now.count - then.count;
  if (total <= 0) return undefined;
  let [below, least] = [0, 0];
  for (const [bound, number] of now.counts) {
    const upTo = number - (then.counts.get(bound) ?? 0);
    if (upTo >= q * total) return least + ((q * total - below) / (upTo - below)) * (bound - least);
    [below, least] = [upTo, bound];
  }
  return least; // beyond the last bound
}

function count(number) {
  return Math.round(number).toLocaleString("en");
}

function percent(part) {
  return part === undefined ? "–" : `${(100 * part).toFixed(part < 0.1 ? 1 : 0)}%`;
}

export class Dashboard {
  constructor() {
    this.looks = [];
    this.cards = CARDS.map((card) => new Card(card));
    byId("cards").append(...this.cards.map((card) => card.element));
  }

  take(said) {
    const now = new Look(said);
    if (this.looks.length && this.looks.at(-1).time_s > now.time_s) this.looks = []; // another server
    this.looks.push(now);
    this.looks.splice(0, this.looks.length - NUM_POINTS - WINDOW_S);
    const before = (span_s) => this.looks.find((look) => look.time_s >= now.time_s - span_s);
    for (const card of this.cards) card.take(now, before);
    fillCalls(now);
    return { running: now.value("quill_sequences_running"), waiting: now.value("quill_requests_waiting") };
  }
}

class Card {
  constructor(card) {
    this.card = card;
    this.points = [];
    this.number = make("p", { class: "number", text: "–" });
    this.note = make("p", { class: "quiet", text: " " });
    this.chart = drawn("svg", { viewBox: "0 0 240 56", preserveAspectRatio: "none", "aria-hidden": "true" });
    const names = (card.names ?? []).map((name, i) => make("span", { class: `name line-${i}`, text: name }));
    const title = make("h2", { text: card.title });
    this.element = make("section", { class: "card" }, make("div", { class: "head" }, title, ...names), this.number, this.chart, this.note);
  }

  take(now, before) {
    const lines = this.card.lines(now, before);
    const [number, note] = this.card.says(lines, now);
    this.number.textContent = number;
    this.note.textContent = note;
    this.points.push(lines);
    this.points.splice(0, this.points.length - NUM_POINTS);
    this.draw();
  }

  draw() {
    const most = this.card.most ?? Math.max(1e-9, ...this.points.flat().filter((each) => each !== undefined)) * 1.1;
    const first = NUM_POINTS - this.points.length;
    const lines = this.points[0].map((_, line) => {
      let path = "";
      let isDown = false;
      this.points.forEach((point, i) => {
        if (point[line] === undefined) {
          isDown = false;
          return;
        }
        const x = ((first + i) / (NUM_POINTS - 1)) * 240;
        const y = 54 - (point[line] / most) * 52;
        path += `${isDown ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`;
        isDown = true;
      });
      return drawn("path", { d: path, class: `line-${line}` });
    });
    const ground = drawn("path", { d: "M0 54.5H240", class: "ground" });
    this.chart.replaceChildren(ground, ...lines.reverse());
  }
}

function fillCalls(now) {
  const rows = (now.metrics.quill_requests ?? []).filter((one) => one.value > 0);
  rows.sort((a, b) => b.value - a.value);
  const shown = rows.map((one) =>
    make(
      "tr",
      {},
      make("td", { class: "mono", text: one.labels.method }),
      make("td", { class: one.labels.outcome === "OK" ? "" : "odd", text: one.labels.outcome }),
      make("td", { class: "count", text: count(one.value) }),
    ),
  );
  byId("calls").tBodies[0].replaceChildren(...shown);
}
