// One answer on the page: its text as it comes, what its tokens might have been, how long it took.
// Knows: elements, streamed chunks. Does not know: where an answer stands, HTTP.

import { byId, make } from "./elements.js";
import { Alignment, percent, tokensOf, visible } from "./tokens.js";

const REASONS = {
  stop: "stop or EOS",
  length: "max tokens",
  deadline: "deadline",
};

export class Answer {
  // `actions`: [label, title, function] beneath it, once it is over.
  constructor(actions) {
    this.actions = actions;
    this.text = "";
    this.tokens = 0;
    this.alignment = new Alignment();
    this.stretches = []; // the tokens of each element
    this.rest = document.createTextNode("");
    this.body = make("div", { class: "text", tabindex: "0", "aria-label": "Answer" }, this.rest);
    this.foot = make("div", { class: "foot" });
    this.element = make("article", { class: "answer running", "aria-busy": "true" }, this.body, this.foot);
    this.startedAt = performance.now();
    this.body.addEventListener("pointerover", (event) => this.point(event.target));
    this.body.addEventListener("click", (event) => this.point(event.target));
    this.body.addEventListener("pointerleave", hidePopover);
    this.body.addEventListener("blur", hidePopover);
    this.body.addEventListener("keydown", (event) => this.walk(event));
  }

  // One chunk of the server's.
  take(chunk) {
    this.fingerprint = chunk.system_fingerprint ?? this.fingerprint;
    this.usage = chunk.usage ?? this.usage;
    this.timings = chunk.timings ?? this.timings;
    const choice = chunk.choices[0];
    if (!choice) return;
    this.say(choice.delta?.content ?? choice.text ?? "", tokensOf(choice.logprobs));
    if (choice.finish_reason) this.reason = choice.quill?.finish_reason ?? choice.finish_reason;
  }

  say(text, tokens) {
    if (!text && !tokens.length) return;
    this.firstAt ??= performance.now();
    this.text += text;
    for (const stretch of this.alignment.add(text, tokens)) {
      this.stretches.push(stretch.tokens);
      const chance = stretch.tokens[0].logprob === null ? 1 : Math.exp(stretch.tokens[0].logprob);
      const kind = chance > 0.5 ? "likely" : chance > 0.1 ? "open" : chance > 0.02 ? "rare" : "odd";
      this.rest.before(make("span", { class: `token ${kind}`, text: stretch.text }));
    }
    this.rest.data = this.alignment.rest;
  }

  end(stopped, error) {
    this.endedAt = performance.now();
    this.element.classList.remove("running");
    this.element.removeAttribute("aria-busy");
    const facts = [stopped ? "stopped" : error ? "broken off" : REASONS[this.reason] ?? this.reason];
    if (this.usage) facts.push(...counts(this.usage));
    facts.push(...times(this.timings, this.usage, this));
    this.foot.replaceChildren();
    if (error) this.foot.append(make("p", { class: "error", role: "alert", text: error.message }));
    this.foot.append(make("p", { class: "facts", text: facts.filter(Boolean).join("  ·  ") }));
    const row = make("div", { class: "actions" });
    for (const [label, title, action] of this.actions) {
      const button = make("button", { type: "button", class: "plain", title, text: label });
      button.addEventListener("click", () => action(this));
      row.append(button);
    }
    this.foot.append(row);
  }

  point(target) {
    const index = [...this.body.children].indexOf(target);
    if (index >= 0) this.show(index);
    else hidePopover();
  }

  // Arrow keys go from token to token.
  walk(event) {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step || !this.stretches.length) return;
    event.preventDefault();
    const from = this.at ?? (step > 0 ? -1 : this.stretches.length);
    this.show(Math.max(0, Math.min(this.stretches.length - 1, from + step)));
    this.body.children[this.at].scrollIntoView({ block: "nearest" });
  }

  show(index) {
    hidePopover();
    this.at = index;
    const element = this.body.children[index];
    element.classList.add("pointed");
    showPopover(this.stretches[index]);
  }
}

function counts(usage) {
  const cached = usage.prompt_tokens_details?.cached_tokens;
  const prompt = `${usage.prompt_tokens} prompt tokens${cached ? ` (${cached} cached)` : ""}`;
  return [`${usage.completion_tokens} tokens`, prompt];
}

// The server's own times; where it told none, those of this page.
function times(timings, usage, { startedAt, firstAt, endedAt }) {
  const said = [];
  if (timings?.first_token_ms) said.push(`first token ${duration(timings.first_token_ms)}`);
  else if (firstAt) said.push(`first token ${duration(firstAt - startedAt)}, seen here`);
  const tokens = usage?.completion_tokens ?? 0;
  const spent = timings ? timings.total_ms - timings.first_token_ms : 0;
  if (tokens > 1 && spent > 0) said.push(`${((1000 * (tokens - 1)) / spent).toFixed(1)} tokens/s`);
  if (timings?.queue_ms >= 1) said.push(`queued ${duration(timings.queue_ms)}`);
  said.push(`${duration(timings?.total_ms ?? endedAt - startedAt)} total`);
  return said;
}

export function duration(ms) {
  return ms < 1000 ? `${Math.round(ms)} ms` : `${(ms / 1000).toFixed(ms < 10000 ? 2 : 1)} s`;
}

function showPopover(tokens) {
  byId("popover").replaceChildren(...tokens.map(told));
  byId("popover").hidden = false;
  movePopover();
}

// To the token that is pointed at, wherever that is now.
export function movePopover() {
  const place = byId("popover");
  if (place.hidden) return;
  const box = document.querySelector(".pointed").getBoundingClientRect();
  const left = Math.min(box.left, window.innerWidth - place.offsetWidth - 8);
  const below = box.bottom + 6 + place.offsetHeight < window.innerHeight;
  place.style.left = `${Math.max(8, left)}px`;
  place.style.top = `${below ? box.bottom + 6 : Math.max(8, box.top - 6 - place.offsetHeight)}px`;
}

function told(token) {
  const rows = [];
  const found = token.top_logprobs.findIndex((other) => String(other.bytes) === String(token.bytes));
  const all = found < 0 ? [...token.top_logprobs, token] : token.top_logprobs;
  const place = found < 0 ? all.length - 1 : found;
  for (const other of all) {
    const chosen = other === all[place];
    const bar = make("span", { class: "meter" }, make("span"));
    bar.firstChild.style.width = `${100 * Math.exp(other.logprob ?? -Infinity)}%`;
    rows.push(
      make(
        "tr",
        { class: chosen ? "chosen" : undefined },
        make("td", { class: "mono", text: visible(other) }),
        make("td", { class: "share", text: other.logprob === null ? "" : percent(other.logprob) }),
        make("td", {}, bar),
      ),
    );
  }
  return make("table", {}, make("tbody", {}, ...rows));
}

export function hidePopover() {
  byId("popover").hidden = true;
  document.querySelector(".pointed")?.classList.remove("pointed");
}
