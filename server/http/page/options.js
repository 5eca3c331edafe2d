// The options beside the prompt: one table says what there is, what it may hold and what is sent.
// Knows: the names that the server takes. Does not know: what is done with them.

import { byId, make } from "./elements.js";

const GROUPS = [
  ["Conversation", [{ name: "system", label: "System prompt", kind: "lines", modes: ["chat"] }]],
  [
    "Sampling",
    [
      { name: "temperature", label: "Temperature", step: 0.1, min: 0, hint: "0 is greedy", sampling: true },
      { name: "top_p", label: "Top-p", step: 0.05, min: 0, max: 1, hint: "1 is off", sampling: true },
      { name: "top_k", label: "Top-k", step: 1, min: 0, hint: "0 is off", sampling: true },
      { name: "min_p", label: "Min-p", step: 0.01, min: 0, max: 1, hint: "0 is off", sampling: true },
      { name: "seed", label: "Seed", step: 1, min: 0, max: Number.MAX_SAFE_INTEGER, hint: "empty: a new one", wide: true },
    ],
  ],
  [
    "Length",
    [
      { name: "max_tokens", label: "Max tokens", step: 1, min: 1, hint: "tokens" },
      { name: "min_tokens", label: "Min tokens", step: 1, min: 0, hint: "tokens" },
      { name: "stop", label: "Stop strings", kind: "strings", hint: "a string a line", sampling: true },
      { name: "stop_token_ids", label: "Stop tokens", kind: "numbers", hint: "ids, with commas", wide: true },
      { name: "ignore_eos", label: "Ignore EOS", kind: "check" },
    ],
  ],
  [
    "Repetition",
    [
      { name: "repetition_penalty", label: "Repetition", step: 0.05, min: 0.01, max: 100, hint: "1 is off", sampling: true },
      { name: "frequency_penalty", label: "Frequency", step: 0.1, min: -2, max: 2, hint: "0 is off", sampling: true },
      { name: "presence_penalty", label: "Presence", step: 0.1, min: -2, max: 2, hint: "0 is off", sampling: true },
      { name: "logit_bias", label: "Bias", kind: "bias", hint: "id:bias", wide: true, sampling: true },
    ],
  ],
  [
    "Beam search",
    [
      { name: "num_beams", label: "Beams", step: 1, min: 1, hint: "1 is off" },
      { name: "length_penalty", label: "Length penalty", step: 0.1, min: -10, max: 10, hint: "1", searching: true },
      { name: "early_stopping", label: "Early stopping", kind: "choice", choices: { "": "heuristic", true: "at once", never: "exact" }, searching: true, wide: true },
    ],
  ],
  [
    "Token probabilities",
    [
      { name: "alternatives", label: "Alternatives", step: 1, min: 0, max: 20, hint: "empty: none shown" },
      { name: "tint", label: "Mark unlikely tokens", kind: "check" },
    ],
  ],
];

const ALL = GROUPS.flatMap(([, options]) => options);
// As `quill chat` samples where the model's author says nothing.
const CALM = { temperature: 0.4, top_p: 0.9, repetition_penalty: 1.1 };

export function buildOptions(model) {
  const isFree = model.family === "FAMILY_CAUSAL" && !Object.keys(model.defaults).length;
  for (const [title, options] of GROUPS) {
    const box = make("fieldset", {}, make("legend", { text: title }));
    box.dataset.modes = options.every((option) => option.modes) ? options[0].modes.join(" ") : "";
    for (const option of options) box.append(field(option, model));
    byId("option-fields").append(box);
  }
  setOptions({ ...(isFree ? CALM : {}), max_tokens: Math.min(512, model.context), alternatives: 5 });
  byId("option-fields").addEventListener("input", refresh);
  byId("option-fields").addEventListener("submit", (event) => event.preventDefault());
  refresh();
}

function field(option, model) {
  const id = `option-${option.name}`;
  const known = model.defaults[option.name];
  const placeholder = known === undefined ? option.hint : String(known);
  const label = make("label", { for: id, text: option.label });
  const input = control(option, { id, name: option.name, placeholder });
  const kind = option.kind === "check" ? "check" : option.kind === "lines" || option.kind === "strings" || option.wide ? "wide" : "";
  return make("div", { class: `field ${kind}` }, ...(option.kind === "check" ? [input, label] : [label, input]));
}

function control(option, attributes) {
  if (option.kind === "check") return make("input", { ...attributes, type: "checkbox", placeholder: undefined });
  if (option.kind === "lines") return make("textarea", { ...attributes, rows: 3, placeholder: "none" });
  if (option.kind === "strings") return make("textarea", { ...attributes, rows: 2 });
  if (option.kind === "choice") {
    const choices = Object.entries(option.choices).map(([value, text]) => make("option", { value, text }));
    return make("select", { ...attributes, placeholder: undefined }, ...choices);
  }
  if (option.kind) return make("input", { ...attributes, type: "text", spellcheck: "false" });
  const { step, min, max } = option;
  return make("input", { ...attributes, type: "number", inputmode: "decimal", step, min, max });
}

// What doesn't go together is greyed out, and isn't sent.
function refresh() {
  const searches = Number(input("num_beams").value) > 1;
  for (const option of ALL) {
    if (option.sampling) input(option.name).disabled = searches;
    if (option.searching) input(option.name).disabled = !searches;
  }
  document.body.classList.toggle("tinted", input("tint").checked);
}

function input(name) {
  return byId(`option-${name}`);
}

export function showOptionsFor(mode) {
  for (const box of document.querySelectorAll("#option-fields fieldset")) {
    box.hidden = Boolean(box.dataset.modes) && !box.dataset.modes.split(" ").includes(mode);
  }
}

// { name: value } of all that were set. Throws an Error that says which one can't be read.
export function getOptions() {
  const values = {};
  for (const option of ALL) {
    const element = input(option.name);
    if (element.disabled) continue;
    const value = option.kind === "check" ? element.checked || undefined : read(option, element);
    if (value !== undefined) values[option.name] = value;
  }
  return values;
}

function read(option, element) {
  if (element.validity.badInput) throw new Error(`${option.label} isn't a number`);
  const text = option.kind === "strings" || option.kind === "lines" ? element.value : element.value.trim();
  if (!text) return undefined;
  if (option.kind === "lines") return text;
  if (option.kind === "strings") return text.split("\n").filter(Boolean);
  if (option.kind === "choice") return text === "true" ? true : text;
  if (option.kind === "numbers") return text.split(/[\s,]+/).filter(Boolean).map((one) => number(option, one));
  if (option.kind === "bias") {
    const pairs = text.split(/[\s,]+/).filter(Boolean).map((one) => one.split(":"));
    return Object.fromEntries(pairs.map(([id, bias]) => [String(number(option, id)), number(option, bias)]));
  }
  return number(option, text);
}

function number(option, text) {
  const value = Number(text);
  if (text === undefined || text === "" || !Number.isFinite(value)) throw new Error(`${option.label}: "${text ?? ""}" isn't a number`);
  return value;
}

export function setOption(name, value) {
  setOptions({ [name]: value });
}

// What isn't among the options, or is of another type, is left out: links come from anywhere.
export function setOptions(values) {
  for (const option of ALL) {
    if (!(option.name in values)) continue;
    const value = values[option.name];
    const element = input(option.name);
    if (option.kind === "check") element.checked = value === true;
    else if (option.kind === "strings" || option.kind === "numbers") element.value = [value].flat().map(String).join(option.kind === "strings" ? "\n" : ", ");
    else if (option.kind === "bias") element.value = Object.entries(value ?? {}).map((pair) => pair.join(":")).join(" ");
    else element.value = value === undefined || value === null ? "" : String(value);
  }
  refresh();
}

export function clearOptions() {
  for (const option of ALL) {
    if (option.kind === "check") input(option.name).checked = false;
    else input(option.name).value = "";
  }
}

// As the server wants them: what only this page knows is left out.
export function sent(options) {
  const { system, alternatives, tint, ...rest } = options;
  return rest;
}
