// Asks the server this page came from.
// Knows: HTTP, server-sent events, the key. Does not know: what is shown.

let key = ""; // in memory only

export function setKey(value) {
  key = value;
}

// What the server refused, in its own words.
export class Refusal extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

function headers() {
  return key ? { authorization: `Bearer ${key}` } : {};
}

async function checked(response) {
  if (response.ok) return response;
  const said = await response.json().catch(() => null);
  throw new Refusal(response.status, said?.error?.message ?? `the server answered ${response.status}`);
}

export async function getJson(path) {
  const response = await fetch(path, { headers: headers(), cache: "no-store" });
  return (await checked(response)).json();
}

// The events of a streamed answer, one after another.
export async function* stream(path, body, signal) {
  const response = await fetch(path, {
    method: "POST",
    headers: { ...headers(), "content-type": "application/json" },
    body: JSON.stringify(body),
    signal,
  });
  await checked(response);
  let rest = "";
  for await (const piece of pieces(response.body.pipeThrough(new TextDecoderStream()))) {
    const events = (rest + piece).split("\n\n");
    rest = events.pop();
    for (const event of events) {
      if (!event.startsWith("data: ")) continue; // a comment
      const data = event.slice("data: ".length);
      if (data === "[DONE]") return;
      const said = JSON.parse(data);
      if (said.error) throw new Refusal(0, said.error.message);
      yield said;
    }
  }
  throw new Refusal(0, "the connection broke before the answer's end");
}

async function* pieces(readable) {
  const reader = readable.getReader();
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    yield value;
  }
}
