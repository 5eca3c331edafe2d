// Says which characters of a text came from which tokens.
// Knows: bytes, log-probabilities. Does not know: elements.
//
// The text is the server's: without special tokens and stop strings. Tokens have true bytes, and one
// may be part of a character; then several tokens share a stretch of text.

const encoder = new TextEncoder();

export class Alignment {
  constructor() {
    this.bytes = []; // of the text so far
    this.cursor = 0; // those that tokens were found for
    this.start = 0; // of the stretch that isn't whole characters yet
    this.open = []; // its tokens
    this.waiting = []; // tokens whose text hasn't come
  }

  // Stretches of text that are certain now: [{ text, tokens }].
  add(text, tokens) {
    this.bytes.push(...encoder.encode(text));
    this.waiting.push(...tokens);
    const found = [];
    while (this.waiting.length) {
      const token = this.waiting[0];
      const length = this.match(spelled(token, this.cursor === 0 ? this.bytes[0] : undefined));
      if (length === undefined) break;
      this.waiting.shift();
      if (!length) continue; // an end: no part of the text
      this.cursor += length;
      this.open.push(token);
      const whole = decode(this.bytes.slice(this.start, this.cursor));
      if (whole === undefined) continue;
      found.push({ text: whole, tokens: this.open });
      this.start = this.cursor;
      this.open = [];
    }
    return found;
  }

  // The text that no token was found for.
  get rest() {
    return new TextDecoder().decode(new Uint8Array(this.bytes.slice(this.start)));
  }

  // How much of the text a token is; 0: none; undefined: that isn't known yet.
  match(bytes) {
    const here = Math.min(bytes.length, this.bytes.length - this.cursor);
    for (let i = 0; i < here; i++) {
      if (bytes[i] !== this.bytes[this.cursor + i]) return 0;
    }
    return here === bytes.length ? here : undefined;
  }
}

// At a text's beginning some tokenizers drop a token's space.
function spelled(token, first) {
  const drops = first !== undefined && first !== 32 && token.bytes[0] === 32;
  return drops ? token.bytes.slice(1) : token.bytes;
}

function decode(bytes) {
  try {
    return new TextDecoder("utf-8", { fatal: true, ignoreBOM: true }).decode(new Uint8Array(bytes));
  } catch {
    return undefined;
  }
}

// A token as it can be read: spaces and line ends show.
export function visible(token) {
  const text = decode(token.bytes);
  if (text === undefined) return token.bytes.map((byte) => `<${byte.toString(16).padStart(2, "0")}>`).join("");
  return text.replaceAll(" ", "␣").replaceAll("\n", "⏎").replaceAll("\t", "⇥") || "∅";
}

export function percent(logprob) {
  const share = 100 * Math.exp(logprob);
  if (share < 0.01) return "< 0.01%";
  return `${share.toFixed(share < 10 ? 2 : 1)}%`;
}

// As chats have them, { token, bytes, logprob, top_logprobs }, whichever way they came.
export function tokensOf(logprobs) {
  if (!logprobs) return [];
  if (logprobs.content) return logprobs.content;
  return logprobs.tokens.map((token, i) => ({
    ...named(token, logprobs.token_logprobs[i]),
    top_logprobs: Object.entries(logprobs.top_logprobs[i] ?? {}).map(([one, logprob]) => named(one, logprob)),
  }));
}

// Completions write parts of characters as bytes:\xe6\x97.
function named(token, logprob) {
  const codes = token.startsWith("bytes:\\x") ? token.slice("bytes:\\x".length).split("\\x") : undefined;
  return { token, logprob, bytes: codes?.map((code) => parseInt(code, 16)) ?? [...encoder.encode(token)] };
}
