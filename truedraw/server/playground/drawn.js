/** What came out of the draws: the last step in words, and a histogram against p. */

import { el, vary } from "./dom.js";
import { count } from "./format.js";

export class DrawResult {
  constructor(names) {
    this.names = names;
    this.told = el("p", { class: "told", role: "status" });
    this.summary = el("p", { class: "hint" });
    this.rows = names.map((name) => {
      const track = el("span", { class: "track" }, el("i", { class: "bar" }), el("i", { class: "expected" }));
      const number = el("span", { class: "number" });
      return { node: el("li", {}, el("span", { class: "name", text: name }), track, number), track, number };
    });
    this.node = el("div", {}, this.told, el("ol", { class: "histogram", "aria-label": "Share of each token" }, ...this.rows.map((row) => row.node)), this.summary);
  }

  reset(p) {
    this.told.textContent = "Nothing drawn yet.";
    this.summary.textContent = "Bars: how often each token came out. Marks: p.";
    this.#bars(p, p.map(() => 0), 1);
  }

  /** last: the one step that was drawn, told in words; null for many. */
  show({ rows, counts, n, seen, chance }, last) {
    this.told.textContent = last ? this.#tell(rows, last) : `${count(n)} tokens drawn.`;
    this.summary.textContent = `${count(n)} drawn: TV between bars and marks ${seen.toFixed(4)}; chance alone makes ${chance.toFixed(4)} on average.`;
    this.#bars(rows.p, counts, n);
  }

  #bars(p, counts, n) {
    const widest = Math.max(...p, ...counts.map((times) => times / n));
    this.rows.forEach(({ node, track, number }, i) => {
      node.hidden = i >= p.length;
      if (node.hidden) return;
      vary(track, { "--share": counts[i] / n / widest, "--expected": p[i] / widest });
      number.textContent = `${(counts[i] / n).toFixed(3)} (p ${p[i].toFixed(3)})`;
    });
  }

  #tell({ p, q }, { draft, u, accepted, token }) {
    const [x, y] = [this.names[draft], this.names[token]];
    const chance = Math.min(1, p[draft] / q[draft]);
    const begin = `Drafted ${x}; min(1, p/q) = ${chance.toFixed(3)}; the coin u = ${u.toFixed(3)} is`;
    return accepted ? `${begin} below it: accepted, ${x} comes out.` : `${begin} not below it: rejected, and the residual gives ${y}.`;
  }
}
