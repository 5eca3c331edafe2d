// Says which characters of a text came from which tokens.
// Knows: bytes, log-probabilities. Does not know: elements.
//
// The text is the server's: without special tokens and stop strings. Tokens have true bytes, and one
// may be part of a character; then several tokens share a stretch of text.

const encoder = new TextEncoder();

export class Alignment {
  constructor() {
    this.text = "";
    this.cursor = 0; // characters that tokens were found for
    this.open = []; // tokens that end within a character
    this.waiting = []; // tokens whose text hasn't come
  }

  // Stretches of text that are certain now: [{ text, tokens }].
  add(text, tokens) {
    this.text += text;
    this.waiting.push(...tokens);
    const found = [];
    while (this.waiting.length) {
      const all = [...this.open, this.waiting[0]];
      const { text: spelled, isWhole } = decode(all.flatMap((token) => token.bytes));
      const written = this.written(spelled);
      if (isWhole && written === undefined) break;
      const token = this.waiting.shift();
      if (!isWhole) this.open.push(token);
      else if (written) {
        this.cursor += written.length;
        this.open = [];
        found.push({ text: written, tokens: all });
      }
    }
    return found;
  }

  // The text that no token was found for.
  get rest() {
    return this.text.slice(this.cursor);
  }

  // What is there of it; "": nothing, as of a token that ends an answer; undefined: that isn't known yet.
  written(spelled) {
    const here = this.rest;
    // At the start of a text some tokenizers drop a token's space.
    const wanted = !this.cursor && here && here[0] !== " " && spelled[0] === " " ? spelled.slice(1) : spelled;
    if (here.startsWith(wanted)) return wanted;
    return wanted.startsWith(here) ? undefined : "";
  }
}

// As the server does it: bytes that can't become a character show as U+FFFD.
function decode(bytes) {
  const decoder = new TextDecoder("utf-8", { ignoreBOM: true });
  const text = decoder.decode(new Uint8Array(bytes), { stream: true });
  return { text, isWhole: decoder.decode() === "" };
}

// A token as it can be read: spaces and line ends show.
export function visible(token) {
  const { text, isWhole } = decode(token.bytes);
  if (!isWhole || text.includes("\ufffd")) return token.bytes.map((byte) => `<${byte.toString(16).padStart(2, "0")}>`).join("");
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
