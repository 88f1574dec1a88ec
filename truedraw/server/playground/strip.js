/** The tape of steps: a column for each, proposed outlined, accepted filled, the target's own token at the foot. */

import { byId, el, vary } from "./dom.js";
import { plural } from "./format.js";

const WIDEST = 14;
const NARROWEST = 3;

export class Strip {
  constructor() {
    this.node = byId("strip");
    this.text = byId("strip-text");
    this.reset();
  }

  reset() {
    this.steps = this.proposed = this.accepted = 0;
    this.tallest = 4;
    this.node.replaceChildren();
    this.node.setAttribute("aria-label", "No steps yet");
    this.#fit();
  }

  /** step: {proposed, accepted, emitted}. */
  add(step) {
    this.steps += 1;
    this.proposed += step.proposed;
    this.accepted += step.accepted;
    this.tallest = Math.max(this.tallest, step.proposed);
    const column = el("span", { class: "step" });
    if (step.emitted > step.accepted) column.append(el("i", { class: "own", data: { origin: ownOrigin(step) } }));
    if (step.accepted) column.append(vary(el("i", { class: "accepted" }), { "--count": step.accepted }));
    if (step.proposed > step.accepted) {
      column.append(vary(el("i", { class: "rejected" }), { "--count": step.proposed - step.accepted }));
    }
    this.node.append(column);
    this.#fit();
    const summary = [
      plural(this.steps, "step"),
      `${this.proposed.toLocaleString("en")} proposed`,
      `${this.accepted.toLocaleString("en")} accepted`,
    ].join(", ");
    this.text.textContent = summary;
    this.node.setAttribute("aria-label", summary);
  }

  /** Columns become narrow while they fit, then the tape scrolls to its end. */
  #fit() {
    const width = Math.min(WIDEST, Math.max(NARROWEST, Math.floor(this.node.clientWidth / Math.max(1, this.steps))));
    vary(this.node, { "--column": `${width}px`, "--tallest": this.tallest + 1, "--gap": this.tallest > 12 ? "0px" : "1px" });
    this.node.scrollLeft = this.node.scrollWidth;
  }
}

function ownOrigin({ proposed, accepted }) {
  if (proposed === 0) return "plain";
  return accepted === proposed ? "bonus" : "residual";
}
