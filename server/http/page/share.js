// A link that says everything an answer came from: prompt, options, seed, and which model it was.
// It is in the part of an address that no server ever sees.

const encoder = new TextEncoder();

export function linkTo(said) {
  const bytes = encoder.encode(JSON.stringify(said));
  const letters = Array.from(bytes, (byte) => String.fromCharCode(byte)).join("");
  const code = btoa(letters).replaceAll("+", "-").replaceAll("/", "_").replaceAll("=", "");
  return `${location.origin}${location.pathname}#share=${code}`;
}

// What a link says; undefined if this is none. Everything in it may be anybody's.
export function sharedIn(hash) {
  if (!hash.startsWith("#share=")) return undefined;
  try {
    const letters = atob(hash.slice("#share=".length).replaceAll("-", "+").replaceAll("_", "/"));
    const said = JSON.parse(new TextDecoder().decode(Uint8Array.from(letters, (letter) => letter.charCodeAt(0))));
    return isSaid(said) ? said : undefined;
  } catch {
    return undefined;
  }
}

function isSaid(said) {
  const isText = (value) => typeof value === "string";
  const isMessage = (value) => ["user", "assistant"].includes(value?.role) && isText(value.content);
  const isInput = isText(said?.prompt) || (Array.isArray(said?.messages) && said.messages.every(isMessage) && said.messages.at(-1)?.role === "user");
  return isInput && ["chat", "complete", "translate"].includes(said.mode) && typeof said.options === "object" && said.options !== null;
}
