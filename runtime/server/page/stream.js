// A streamed chat completion: server-sent events in, pieces of text out.

/** What the server said when it refused or failed, in words. */
export class ServerError extends Error {}

/** Yields the parsed `data` of every event until the stream ends or says [DONE]. */
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const lines = (rest + value).split(/\r?\n/);
      rest = lines.pop();
      for (const line of lines) {
        if (!line.startsWith("data:")) continue; // comments that keep the connection open, blank lines
        const data = line.slice(5).trim();
        if (data === "[DONE]") return;
        yield JSON.parse(data);
      }
    }
  } finally {
    reader.cancel().catch(() => {}); // already closed when it was aborted
  }
}

const HINTS = {
  401: "Enter a key that the server knows under Settings, API key.",
  403: "Enter a key that the server knows under Settings, API key.",
};

async function refusal(response) {
  let said = "";
  try {
    const body = await response.json();
    said = body.error?.message ?? body.message ?? body.detail ?? "";
  } catch {
    // not JSON: the status has to do
  }
  if (typeof said !== "string") said = JSON.stringify(said);
  said ||= `The server answered ${response.status} ${response.statusText}`.trim();
  return new ServerError([sentence(said), HINTS[response.status]].filter(Boolean).join(" "));
}

/** With a capital, unless it begins with the name of a field, and a full stop. */
function sentence(said) {
  return said.replace(/^[a-z](?=[a-z]* )/, (letter) => letter.toUpperCase()).replace(/[^.!?]$/, "$&.");
}

/**
 * Sends a chat and yields { text, finish, usage } as they come; fields that an event does not have are undefined.
 * Throws ServerError with words for the user; an abort of `signal` throws AbortError.
 */
export async function* streamChat(request, key, signal) {
  const headers = { "Content-Type": "application/json" };
  if (key) headers.Authorization = `Bearer ${key}`;
  const body = JSON.stringify({ ...request, stream: true, stream_options: { include_usage: true } });
  let finished = false;
  try {
    const response = await fetch("/v1/chat/completions", { method: "POST", headers, body, signal });
    if (!response.ok) throw await refusal(response);
    for await (const event of events(response.body)) {
      if (event.error) throw new ServerError(sentence(event.error.message ?? "the server failed"));
      const choice = event.choices?.[0];
      finished ||= Boolean(choice?.finish_reason);
      yield { text: choice?.delta?.content, finish: choice?.finish_reason, usage: event.usage };
    }
  } catch (error) {
    if (error instanceof ServerError || error.name === "AbortError") throw error;
    throw new ServerError("The server cannot be reached. Is it running? Try again in a moment.");
  }
  if (!finished) throw new ServerError("The answer broke off: the connection ended early.");
}
