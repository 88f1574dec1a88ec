/** The tokens of one answer: a span for each, coloured by origin, one of them in the tab order, arrows move between them. */

import { el } from "./dom.js";

/**
 * details: where a token that is pointed at or focused is shown (see details.js).
 * Characters that span tokens are decoded once for the whole answer and belong to the token that completes them.
 */
export class TokenText {
  constructor(details, label = "Answer, token by token: arrow keys move between tokens") {
    this.details = details;
    this.tokens = [];
    this.decoder = new TextDecoder("utf-8", { ignoreBOM: true });
    this.pending = [];
    this.node = el("div", {
      class: "tokens",
      role: "group",
      "aria-label": label,
      on: {
        pointerover: (event) => this.#show(event.target, false),
        focusin: (event) => this.#focused(event.target),
        keydown: (event) => this.#move(event),
        click: (event) => event.target.closest(".token")?.focus(),
      },
    });
  }

  /** One token of a trace: {id, text, bytes, origin, p, q, top}. */
  add(token) {
    const text = this.decoder.decode(new Uint8Array(token.bytes ?? []), { stream: true });
    const index = this.tokens.length;
    const span = el("span", {
      class: "token",
      text,
      tabindex: index === 0 ? "0" : "-1",
      data: { origin: token.origin, index },
    });
    if (text === "") span.classList.add(token.bytes?.length ? "partial" : "special");
    if (text.includes("\n")) span.classList.add("newline");
    const shown = text || token.bytes?.length ? text : token.text;
    this.tokens.push({ ...token, shown, begun: text === "" ? [] : this.pending });
    this.pending = text === "" ? [...this.pending, ...(token.bytes ?? [])] : [];
    this.node.append(span);
  }

  /** Text that came without tokens, as from a server that traces nothing. */
  addPlain(text) {
    this.node.append(text);
  }

  /** After the last token: what is left of an unfinished character is shown as U+FFFD, at the last token. */
  finish() {
    const rest = this.decoder.decode();
    const last = this.node.lastElementChild;
    if (!rest || !last) return;
    last.append(rest);
    last.classList.remove("partial");
    this.tokens.at(-1).shown += rest;
  }

  get ids() {
    return this.tokens.map((token) => token.id);
  }

  /** Marks a token as the first that differs from another answer; without one (the text ended), the end. */
  mark(index) {
    const span = this.node.querySelector(`[data-index="${index}"]`);
    if (span) span.classList.add("differs");
    else this.node.append(el("span", { class: "differs ended", text: "(end)" }));
  }

  #show(target, spoken) {
    const span = target.closest?.(".token");
    if (!span) return;
    this.details.show(this.tokens[Number(span.dataset.index)], { span, spoken });
  }

  #focused(target) {
    if (!target.classList.contains("token")) return;
    this.node.querySelector('[tabindex="0"]')?.setAttribute("tabindex", "-1");
    target.setAttribute("tabindex", "0");
    this.#show(target, true);
  }

  #move(event) {
    const spans = [...this.node.querySelectorAll(".token")];
    const at = spans.indexOf(document.activeElement);
    if (at < 0) return;
    const to = {
      ArrowRight: () => at + 1,
      ArrowLeft: () => at - 1,
      ArrowDown: () => onNextLine(spans, at, 1),
      ArrowUp: () => onNextLine(spans, at, -1),
      Home: () => 0,
      End: () => spans.length - 1,
    }[event.key]?.();
    if (to === undefined) return;
    event.preventDefault();
    spans[Math.min(Math.max(to, 0), spans.length - 1)].focus();
  }
}

/** The token nearest in x on the line below (direction 1) or above (-1). */
function onNextLine(spans, at, direction) {
  const from = spans[at].getBoundingClientRect();
  let best = at;
  let distance = Infinity;
  let line = null;
  for (let i = at + direction; i >= 0 && i < spans.length; i += direction) {
    const box = spans[i].getBoundingClientRect();
    if (Math.abs(box.top - from.top) < from.height / 2) continue;
    line ??= box.top;
    if (Math.abs(box.top - line) > from.height / 2) break;
    if (Math.abs(box.left - from.left) < distance) [best, distance] = [i, Math.abs(box.left - from.left)];
  }
  return best;
}
