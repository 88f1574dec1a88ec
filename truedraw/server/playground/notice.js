/** One calm line above the composer: what went wrong and what to do. */

import { ServerError } from "./api.js";
import { byId, el } from "./dom.js";

let timer = null;

export function clearNotice() {
  clearTimeout(timer);
  byId("notice").replaceChildren();
}

/** actions: [{label, run}] as buttons. */
export function showNotice(title, text, actions = []) {
  clearNotice();
  const close = el("button", { type: "button", class: "quiet", text: "Dismiss", on: { click: clearNotice } });
  const buttons = actions.map(({ label, run }) => el("button", { type: "button", text: label, on: { click: run } }));
  const body = el("p", {}, el("strong", { text: title }), " ", el("span", { class: "notice-text", text }));
  byId("notice").replaceChildren(body, el("div", { class: "notice-buttons" }, ...buttons, close));
  return body.querySelector(".notice-text");
}

const KEPT = {
  nothing: "Your text is back in the box.",
  part: "What had come is kept above, and your text is back in the box.",
  none: "",
};

/** What an error means to the reader. retry: does the same again; came: what of the answer had come ("none": nothing was asked). */
export function showError(error, { retry, came, askKey }) {
  const again = { label: "Try again", run: retry };
  const kept = KEPT[came];
  if (!(error instanceof ServerError)) {
    showNotice("The page failed.", `${error.name}: ${error.message}`, [again]);
    throw error;
  }
  if (error.status === 401) {
    showNotice("The server asks for an API key.", kept);
    askKey();
  } else if (error.status === 429) {
    waitFor(error, kept, again);
  } else if (error.kind === "connection") {
    showNotice("No connection.", `${error.message} ${kept}`, [again]);
  } else if (error.kind === "stream") {
    showNotice("The answer broke off.", `The server said: ${error.message}. ${kept}`, [again]);
  } else {
    showNotice("The server refused.", `It said: ${error.message}. ${kept}`);
  }
}

/** Says when to try again, and once more when that time has come: a ticking clock would be read out every second. */
function waitFor({ message, retryAfter }, kept, again) {
  const when = retryAfter === null ? "" : `Try again in ${retryAfter} s. `;
  const text = showNotice("The server is busy.", `It said: ${message}. ${when}${kept}`, [again]);
  if (retryAfter !== null) timer = setTimeout(() => (text.textContent = `You can try again now. ${kept}`), 1000 * retryAfter);
}
