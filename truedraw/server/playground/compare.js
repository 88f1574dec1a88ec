/** The same prompt and seed with drafts and without, one after the other, side by side. */

import { Answer } from "./answer.js";
import { el, vary } from "./dom.js";
import * as format from "./format.js";

export class Comparison {
  constructor(details) {
    this.drafted = new Answer(details, "Answer with drafts, token by token");
    this.plain = new Answer(details, "Answer without drafts, token by token");
    this.verdict = el("p", { class: "verdict" });
    this.bars = el("div", { class: "race" });
    this.node = el(
      "div",
      { class: "comparison" },
      el(
        "div",
        { class: "sides" },
        el("section", {}, el("h3", { text: "With drafts" }), this.drafted.node),
        el("section", {}, el("h3", { text: "Without" }), this.plain.node),
      ),
      this.verdict,
      this.bars,
    );
  }

  /** request(off): what to ask with drafts (false) and without (true). One at a time, so that each has the machine to itself. */
  async run(request, { signal, onDrafted, onPlain }) {
    this.verdict.textContent = "First with drafts, then without, so that each has the machine to itself.";
    await this.drafted.run(request(false), { signal, on: onDrafted });
    this.drafted.close();
    await this.plain.run(request(true), { signal, on: onPlain });
    this.plain.close();
    this.#judge();
  }

  #judge() {
    const at = firstDifference(this.drafted.view.ids, this.plain.view.ids);
    this.node.classList.add(at === null ? "same" : "different");
    if (at !== null) for (const answer of [this.drafted, this.plain]) answer.view.mark(at);
    const speeds = [this.drafted, this.plain].map((answer) => answer.meter.speeds({ now: false }).speed);
    const ratio = speeds.every(Boolean) ? ` With drafts ${format.ratio(speeds[0] / speeds[1])} as fast as without, measured.` : "";
    const same = at === null ? "The same text, token for token." : `Differs from token ${at + 1} on, marked in both.`;
    this.verdict.replaceChildren(el("strong", { text: same }), ratio);
    const fastest = Math.max(...speeds);
    if (ratio) this.bars.replaceChildren(bar("With drafts", speeds[0], fastest), bar("Without", speeds[1], fastest));
  }
}

/** The index of the first token in which two lists differ, an end being a difference too; null if they are equal. */
export function firstDifference(left, right) {
  const length = Math.max(left.length, right.length);
  for (let i = 0; i < length; i += 1) if (left[i] !== right[i]) return i;
  return null;
}

function bar(name, value, fastest) {
  return el(
    "p",
    {},
    el("span", { class: "name", text: name }),
    el("span", { class: "track" }, vary(el("i", { class: "bar" }), { "--share": value / fastest })),
    el("span", { class: "number", text: format.speed(value) }),
  );
}
