/** The panel that says everything known about one token. On a phone it lies over the bottom of the page while it is open. */

import { announce, byId, el, vary } from "./dom.js";
import { ORIGINS, count, probability, visible } from "./format.js";

export class Details {
  constructor() {
    this.panel = byId("details");
    this.body = byId("details-body");
    this.span = null;
    byId("details-close").addEventListener("click", () => this.close());
    document.addEventListener("keydown", (event) => {
      if (event.key === "Escape") this.close();
    });
    document.addEventListener("pointerdown", (event) => {
      if (!event.target.closest("#details, .tokens")) this.#open(false);
    });
  }

  /** spoken: also say it to screen readers, as for a token that got the focus. */
  show(token, { span, spoken }) {
    this.span?.classList.remove("shown");
    this.span = span;
    span.classList.add("shown");
    this.body.replaceChildren(...describe(token));
    if (spoken) {
      this.#open(true);
      announce(sentence(token));
      span.scrollIntoView({ block: "nearest" });
    }
  }

  close() {
    this.#open(false);
    this.span?.classList.remove("shown");
  }

  /** Forgets the token, as when the conversation is cleared. */
  reset() {
    this.close();
    this.span = null;
    this.body.replaceChildren(el("p", { class: "hint", text: "Point at a token, or move to one with the arrow keys." }));
  }

  #open(open) {
    this.panel.classList.toggle("open", open);
    document.body.classList.toggle("details-open", open);
  }
}

const alone = ({ p, q }) => (q > 0 ? Math.min(1, p / q) : 0);

function sentence(token) {
  const parts = [`${visible(token.shown, token.bytes)}: ${token.origin}`, `p ${probability(token.p)}`];
  if (token.origin === "draft") parts.push(`q ${probability(token.q)}`, `chance of acceptance ${probability(alone(token))}`);
  return parts.join(", ");
}

function describe(token) {
  const facts = [
    ["id", "token id", count(token.id)],
    ["p", "target's probability", probability(token.p)],
  ];
  if (token.q !== null && token.q !== undefined) facts.push(["q", "drafter's probability", probability(token.q)]);
  if (token.origin === "draft") facts.push(["min(1, p/q)", "accepted with", probability(alone(token))]);
  return [
    el("p", { class: "glyph" }, el("span", { text: visible(token.shown, token.bytes) })),
    el(
      "p",
      { class: "origin" },
      el("span", { class: "sample", data: { origin: token.origin }, text: token.origin }),
      ` ${ORIGINS[token.origin] ?? ""}`,
    ),
    ...(token.begun.length ? [el("p", { class: "hint", text: `Completes a character begun by ${visible("", token.begun)}.` })] : []),
    el("dl", { class: "facts" }, ...facts.map(([sign, name, value]) => fact(sign, name, value))),
    ...alternatives(token),
  ];
}

function fact(sign, name, value) {
  return el("div", {}, el("dt", {}, el("b", { text: sign }), ` ${name}`), el("dd", { text: value }));
}

function alternatives(token) {
  const top = token.top ?? [];
  if (!top.length) return [];
  const rows = top.some((one) => one.id === token.id) ? top : [...top, { id: token.id, text: token.text, p: token.p }];
  return [
    el("h3", { text: "Most likely here" }),
    el("ol", { class: "alternatives" }, ...rows.map((one) => alternative(one, one.id === token.id))),
  ];
}

function alternative({ text, p }, chosen) {
  const bar = vary(el("i", { class: "bar" }), { "--share": p });
  return el(
    "li",
    { class: chosen ? "chosen" : null },
    el("span", { class: "name", text: visible(text) }),
    el("span", { class: "track" }, bar),
    el("span", { class: "number", text: probability(p) }),
    chosen ? el("span", { class: "unseen", text: "this one" }) : null,
  );
}
