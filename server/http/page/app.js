// The page: what is asked, where answers stand, which part shows.
// Knows: all parts of the page. Does not know: how answers are read or sampled.

import { getJson, Refusal, setKey, stream } from "./api.js";
import { Answer, hidePopover, movePopover } from "./answer.js";
import { Dashboard } from "./dashboard.js";
import { byId, make, toast } from "./elements.js";
import { buildOptions, clearOptions, getOptions, sent, setOption, setOptions, showOptionsFor } from "./options.js";
import { linkTo, sharedIn } from "./share.js";

const LABELS = {
  chat: ["Message", "Send"],
  complete: ["Text to continue", "Continue"],
  translate: ["Text to translate", "Translate"],
};
const THEMES = ["auto", "light", "dark"];
const LOOK_MS = 1000;

let model;
let mode;
let messages = []; // of the chat, without the system prompt
let running; // { abort, done } while an answer is made
let dashboard;
let nextLook;

// ------------------------------------------------------------------------------------- asking

function request(asked) {
  const { system, alternatives } = asked.options;
  const body = { ...sent(asked.options), stream: true, stream_options: { include_usage: true } };
  if (asked.mode === "chat") {
    const before = system ? [{ role: "system", content: system }] : [];
    const logprobs = alternatives === undefined ? {} : { logprobs: true, top_logprobs: alternatives };
    return ["v1/chat/completions", { ...body, ...logprobs, messages: [...before, ...asked.messages] }];
  }
  const logprobs = alternatives === undefined ? {} : { logprobs: alternatives };
  return ["v1/completions", { ...body, ...logprobs, prompt: asked.prompt }];
}

// `asked`: all that an answer comes from: { mode, messages or prompt, options }.
function answer(wanted, place) {
  // Picked here where none was given, so the seed of an answer that was stopped before its first token is known, too.
  const asked = { ...wanted, options: { ...wanted.options, seed: wanted.options.seed ?? anySeed() } };
  const seeded = [
    [`Seed ${asked.options.seed}`, "Put this seed into the options", () => setOption("seed", asked.options.seed)],
    ["Regenerate", "With the same seed: the same answer", (one) => again(asked, one, asked.options)],
    ["New seed", "Another answer", (one) => again(asked, one, { ...asked.options, seed: undefined })],
  ];
  const shown = new Answer([
    ...(asked.options.num_beams > 1 ? [] : seeded), // beam search samples nothing
    ["Copy", "The answer's text", (one) => copy(one.text, "The answer is copied")],
    ["Share", "A link with prompt, options and seed", (one) => share(asked, one)],
  ]);
  place(shown.element);
  const abort = new AbortController();
  running = { abort, done: tell(asked, shown, abort.signal) };
  setBusy(true);
}

function anySeed() {
  const [high, low] = crypto.getRandomValues(new Uint32Array(2));
  return (high % 2 ** 21) * 2 ** 32 + low; // 53 bits: as many as a number has here
}

async function tell(asked, shown, signal) {
  let error;
  try {
    for await (const chunk of stream(...request(asked), signal)) {
      shown.take(chunk);
      follow();
    }
  } catch (caught) {
    if (caught.name !== "AbortError") error = caught;
    if (caught.status === 401) askForKey();
  }
  shown.end(signal.aborted, error);
  if (asked.mode === "chat") keep(asked.messages, shown.text);
  running = undefined;
  setBusy(false);
  follow();
}

// What comes to nothing isn't part of the conversation.
function keep(asked, text) {
  messages = text ? [...asked, { role: "assistant", content: text }] : asked.slice(0, -1);
  if (!text && mode === "chat" && !byId("input").value) byId("input").value = asked.at(-1).content;
}

async function again(asked, old, options) {
  await stop();
  while (old.element.nextSibling) old.element.nextSibling.remove();
  answer({ ...asked, options }, (element) => old.element.replaceWith(element));
}

async function send() {
  const text = byId("input").value;
  if (!text.trim()) return;
  let options;
  try {
    options = getOptions();
  } catch (error) {
    toast(error.message);
    return;
  }
  await stop();
  if (mode === "chat") {
    const asked = [...messages, { role: "user", content: text }];
    showMessage("user", text);
    byId("input").value = "";
    grow();
    answer({ mode, messages: asked, options }, (element) => byId("thread").append(element));
  } else {
    answer({ mode, prompt: text, options }, (element) => byId("result").replaceChildren(element));
  }
}

// Until it is over, and what was said is kept.
async function stop() {
  running?.abort.abort();
  await running?.done;
}

function setBusy(is) {
  byId("send").textContent = is ? "Stop" : LABELS[mode]?.[1] ?? "Send";
  byId("send").classList.toggle("stop", is);
}

// ------------------------------------------------------------------------------------ showing

function showMessage(role, text) {
  const said = make("article", { class: role }, make("div", { class: "text", text }));
  byId("thread").append(said);
}

// Goes on reading at the end, unless somebody has gone back.
function follow() {
  const thread = byId("thread");
  const left = thread.scrollHeight - thread.scrollTop - thread.clientHeight;
  if (left < 160) thread.scrollTop = thread.scrollHeight;
}

function grow() {
  const input = byId("input");
  if (mode !== "chat") {
    input.style.height = "";
    return;
  }
  input.style.height = "auto";
  input.style.height = `${Math.min(input.scrollHeight + 2, window.innerHeight / 3)}px`;
}

async function clear() {
  await stop();
  messages = [];
  byId("thread").replaceChildren();
  byId("result").replaceChildren();
  byId("input").value = "";
  history.replaceState(null, "", location.pathname);
  grow();
  byId("input").focus();
}

async function choose(wanted) {
  if (wanted !== "dashboard" && wanted !== mode) await stop();
  const talks = wanted !== "dashboard";
  if (talks) {
    mode = wanted;
    document.body.dataset.mode = mode;
    byId("input-label").textContent = LABELS[mode][0];
    byId("input").placeholder = LABELS[mode][0];
    byId("thread").hidden = mode !== "chat";
    byId("result").hidden = mode === "chat";
    setBusy(Boolean(running));
    showOptionsFor(mode);
    grow();
  }
  for (const tab of document.querySelectorAll("[role=tab]")) {
    tab.setAttribute("aria-selected", tab.id === `tab-${wanted}`);
  }
  byId("talk").hidden = !talks;
  byId("dashboard").hidden = talks;
  hidePopover();
}

// ------------------------------------------------------------------------------------ sharing

async function copy(text, said, otherwise = "This browser doesn't let pages copy") {
  try {
    await navigator.clipboard.writeText(text);
    toast(said);
  } catch {
    toast(otherwise);
  }
}

function share(asked, one) {
  const { tint, ...options } = asked.options;
  const said = { ...asked, options, fingerprint: one.fingerprint };
  const link = linkTo(said);
  history.replaceState(null, "", link);
  copy(link, "The link is copied: it gives this answer again", "The link is in the address bar");
}

async function openShared(said) {
  if (byId(`tab-${said.mode}`).hidden) {
    toast("This link is for a model of another kind");
    return;
  }
  await choose(said.mode);
  clearOptions();
  setOptions(said.options);
  if (said.mode === "chat") {
    messages = said.messages.slice(0, -1);
    byId("thread").replaceChildren();
    for (const { role, content } of messages) showMessage(role, content);
  }
  byId("input").value = said.prompt ?? said.messages.at(-1).content;
  grow();
  byId("input").focus();
  const own = model.fingerprint;
  const isOwn = said.fingerprint === undefined || said.fingerprint === own;
  toast(isOwn ? "Press Enter for the answer that was shared" : `The answer was ${said.fingerprint}'s; this is ${own}, and may answer differently`);
}

// -------------------------------------------------------------------------------- the server

function askForKey() {
  byId("key").hidden = false;
  byId("key-dialog").returnValue = "";
  if (!byId("key-dialog").open) byId("key-dialog").showModal();
}

async function meet() {
  try {
    model = await getJson("model");
  } catch (error) {
    byId("model").textContent = error.message;
    if (error.status === 401) askForKey();
    else setTimeout(meet, 2000); // it is loading, or away
    return;
  }
  byId("model").textContent = `${model.name}  ·  ${model.precision}`;
  byId("model").title = `${model.name}, ${model.precision} on ${model.device}, ${Number(model.num_parameters).toLocaleString("en")} parameters, context ${model.context}`;
  document.title = `${model.name} · Quill`;
  const modes = modesOf(model);
  for (const each of modes) byId(`tab-${each}`).hidden = false;
  if (byId("option-fields").children.length === 0) buildOptions(model);
  await choose(modes[0] ?? "dashboard");
  const shared = sharedIn(location.hash);
  if (shared) openShared(shared);
  else byId("input").focus();
  dashboard ??= new Dashboard();
  clearTimeout(nextLook);
  look();
}

function modesOf({ family, chat_template, has_tokenizer }) {
  if (!has_tokenizer || family === "FAMILY_ENCODER") return [];
  if (family === "FAMILY_SEQ2SEQ") return ["translate"];
  return chat_template ? ["chat", "complete"] : ["complete"];
}

// Looks at the server's numbers while anybody looks at this page.
async function look() {
  try {
    if (!document.hidden) {
      const load = dashboard.take(await getJson("stats"));
      byId("load").textContent = `${load.running} running, ${load.waiting} waiting`;
    }
  } catch (error) {
    byId("load").textContent = error instanceof Refusal ? "" : "the server is away";
    if (error.status === 401) {
      askForKey(); // and goes on with it
      return;
    }
  }
  nextLook = setTimeout(look, LOOK_MS);
}

// ------------------------------------------------------------------------------------ theme

function setTheme(theme) {
  if (theme === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  byId("theme").textContent = theme[0].toUpperCase() + theme.slice(1);
  byId("theme").title = `Colours: ${theme}`;
  localStorage.setItem("quill.theme", theme);
}

function nextTheme() {
  const theme = localStorage.getItem("quill.theme") ?? "auto";
  setTheme(THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length]);
}

// ------------------------------------------------------------------------------------ wiring

function wire() {
  byId("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    if (running) stop();
    else send();
  });
  byId("input").addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    send();
  });
  byId("input").addEventListener("input", grow);
  byId("clear").addEventListener("click", clear);
  byId("theme").addEventListener("click", nextTheme);
  byId("key").addEventListener("click", askForKey);
  byId("key-cancel").addEventListener("click", () => byId("key-dialog").close(""));
  byId("key-dialog").addEventListener("close", () => {
    const given = byId("key-field").value.trim();
    byId("key-field").value = "";
    if (byId("key-dialog").returnValue !== "ok" || !given) return;
    setKey(given);
    meet();
  });
  const tabs = [...document.querySelectorAll("[role=tab]")];
  for (const tab of tabs) tab.addEventListener("click", () => choose(tab.id.slice("tab-".length)));
  document.querySelector("[role=tablist]").addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    const shown = tabs.filter((tab) => !tab.hidden);
    shown[(shown.indexOf(event.target) + step + shown.length) % shown.length].focus();
  });
  document.addEventListener("keydown", (event) => {
    if (event.key !== "Escape" || byId("key-dialog").open) return;
    hidePopover();
    stop();
  });
  window.addEventListener("hashchange", () => {
    const shared = sharedIn(location.hash);
    if (shared && model) openShared(shared);
  });
  document.addEventListener("scroll", movePopover, true);
}

setTheme(localStorage.getItem("quill.theme") ?? "auto");
if (window.matchMedia("(max-width: 800px)").matches) byId("options").open = false;
wire();
meet();
