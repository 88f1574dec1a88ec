/** The server's HTTP interface: its models, and one answer as a stream. Paths are relative, so that a prefix may stand before them. */

import { events } from "./sse.js";

/** What the server or the connection answered instead. kind: "http", "stream" (in the middle of an answer) or "connection". */
export class ServerError extends Error {
  constructor(message, { kind, status = null, retryAfter = null }) {
    super(message);
    Object.assign(this, { kind, status, retryAfter });
  }
}

const KEY = "truedraw-key";

export const key = {
  get: () => sessionStorage.getItem(KEY) ?? "",
  set: (value) => (value ? sessionStorage.setItem(KEY, value) : sessionStorage.removeItem(KEY)),
};

const lost = (message) => new ServerError(message, { kind: "connection" });

async function request(path, options) {
  const headers = { ...options.headers };
  if (key.get()) headers.Authorization = `Bearer ${key.get()}`;
  let response;
  try {
    response = await fetch(path, { ...options, headers, cache: "no-store" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw lost("The server cannot be reached.");
  }
  if (response.ok) return response;
  throw new ServerError(await message(response), {
    kind: "http",
    status: response.status,
    retryAfter: seconds(response.headers.get("Retry-After")),
  });
}

async function message(response) {
  const text = await response.text().catch(() => "");
  try {
    return JSON.parse(text).error.message;
  } catch {
    return `The server answered ${response.status} ${response.statusText}`.trim();
  }
}

/** Retry-After is a number of seconds or a date. */
function seconds(header) {
  if (!header) return null;
  const value = /^\d+$/.test(header) ? Number(header) : Math.ceil((Date.parse(header) - Date.now()) / 1000);
  return Number.isFinite(value) ? Math.max(0, value) : null;
}

/** The first model: {id, truedraw: {chat, drafters, rules, ...}}. Throws ServerError. */
export async function model() {
  const response = await request("v1/models", {});
  const models = (await response.json()).data;
  if (!models?.length) throw new ServerError("The server has no model.", { kind: "http", status: response.status });
  return models[0];
}

/**
 * One answer, streamed or (body.stream false) whole: yields {text, step, tokens, finish, summary} for each chunk that says something of the first choice.
 * Throws ServerError, and AbortError when `signal` fires.
 */
export async function* answer(path, body, signal) {
  const response = await request(path, {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify(body),
    signal,
  });
  if (!body.stream) {
    yield* stepByStep(await response.json());
    return;
  }
  let finished = false;
  try {
    for await (const data of events(response.body)) {
      if (data === "[DONE]") continue; // the body ends by itself; leaving now would look to the server like a client that went away
      const chunk = JSON.parse(data);
      if (chunk.error) throw new ServerError(chunk.error.message, { kind: "stream" });
      const choice = chunk.choices?.find((one) => one.index === 0);
      if (!choice) continue;
      finished ||= Boolean(choice.finish_reason);
      yield {
        text: choice.delta?.content ?? choice.text ?? "",
        step: choice.speculation?.step ?? null,
        tokens: choice.speculation?.tokens ?? [],
        finish: choice.finish_reason ?? null,
        summary: chunk.speculation ?? null,
      };
    }
  } catch (error) {
    if (error instanceof ServerError || error.name === "AbortError") throw error;
    throw lost("The connection was lost in the middle of the answer.");
  }
  if (!finished) throw lost("The connection was lost in the middle of the answer.");
}

/** A whole answer as the chunks that a stream would have had. */
function* stepByStep({ choices, speculation: summary }) {
  const [{ message, text, finish_reason: finish, speculation }] = choices;
  let at = 0;
  for (const step of speculation?.steps ?? []) {
    const tokens = speculation.tokens.slice(at, at + step.emitted);
    at += tokens.length;
    yield { text: "", step, tokens, finish: null, summary: null };
  }
  yield { text: message?.content ?? text ?? "", step: null, tokens: speculation?.tokens.slice(at) ?? [], finish, summary };
}
