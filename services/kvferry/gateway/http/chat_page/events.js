// Server-sent events of a streamed answer.

const IDLE_MS = 600000;
const MAX_EVENT_CHARS = 1 << 22;

/** Yield the data of each event of a response's body as text, until the body ends. */
export async function* events(body, onIdle) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  let data = [];
  let size = 0;
  try {
    for (;;) {
      const timer = setTimeout(onIdle, IDLE_MS);
      const { done, value } = await reader.read().finally(() => clearTimeout(timer));
      if (done) return;
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      if (rest.length > MAX_EVENT_CHARS) throw new Error("an event is too large");
      for (const line of lines.map((one) => one.replace(/\r$/, ""))) {
        if (line.startsWith("data:")) {
          data.push(line.slice(5).replace(/^ /, ""));
          size += line.length;
          if (size > MAX_EVENT_CHARS) throw new Error("an event is too large");
        }
        else if (line === "" && data.length) {
          yield data.join("\n");
          data = [];
          size = 0;
        }
      }
    }
  } finally {
    reader.cancel().catch(() => {}); // what the page does not read any more, the server need not compute
  }
}
