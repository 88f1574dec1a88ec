/** From a conversation and the settings to what the server is asked. */

const ALTERNATIVES = 5;

/**
 * turns: [{prompt, answer}] so far; settings: see settings.js. Returns {path, body}.
 * A server that streams at an even size tells nothing of tokens in a stream: there the answer is asked for as a whole.
 * A model without a chat template continues the plain text of all turns, each on a new line.
 */
export function toRequest(model, turns, prompt, settings) {
  const body = {
    model: model.id,
    temperature: settings.temperature,
    max_tokens: settings.maxTokens,
    stream: !model.truedraw.steady_stream,
    speculation: { ...speculation(settings), trace: true, alternatives: ALTERNATIVES },
  };
  if (settings.seed !== null) body.seed = settings.seed;
  if (!model.truedraw.chat) {
    const before = turns.map((turn) => `${turn.prompt}${turn.answer}\n`).join("");
    return { path: "v1/completions", body: { ...body, prompt: before + prompt } };
  }
  const messages = turns.flatMap((turn) => [
    { role: "user", content: turn.prompt },
    { role: "assistant", content: turn.answer },
  ]);
  return { path: "v1/chat/completions", body: { ...body, messages: [...messages, { role: "user", content: prompt }] } };
}

function speculation({ off, drafter, rule, maxDraft }) {
  if (off) return { off: true };
  const chosen = { drafter, rule: rule === "auto" ? null : rule, max_draft: maxDraft };
  return Object.fromEntries(Object.entries(chosen).filter(([, value]) => value !== null));
}
