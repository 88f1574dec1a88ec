/** What a step makes of p and q: accepted, rejected and residual mass of each token, and the identity they obey. */

import { el, vary } from "./dom.js";
import { percent } from "./format.js";

const number = (value) => value.toFixed(3);

/** Bars side by side for each token: q split into accepted and rejected, p split into accepted and shortfall. */
export class MassPicture {
  constructor(names) {
    this.names = names;
    this.columns = names.map((name) => {
      const part = (kind) => el("i", { class: `part ${kind}` });
      const parts = { kept: part("kept"), rejected: part("rejected"), again: part("kept"), shortfall: part("shortfall") };
      const stacks = [
        el("span", { class: "stack" }, parts.kept, parts.rejected),
        el("span", { class: "stack" }, parts.again, parts.shortfall),
      ];
      const pair = el("span", { class: "pair" }, ...stacks);
      const signs = el("span", { class: "signs" }, el("span", { text: "q" }), el("span", { text: "p" }));
      return { node: el("div", { class: "mass" }, pair, signs, el("span", { class: "name", text: name })), parts };
    });
    this.text = el("p", { class: "unseen" });
    this.alpha = el("dd");
    this.variation = el("dd");
    this.note = el("p", { class: "hint" });
    const key = (kind, text) => el("li", {}, el("i", { class: `part ${kind}` }), text);
    this.node = el(
      "section",
      { class: "pane masses", "aria-labelledby": "masses-title" },
      el("h2", { id: "masses-title", text: "What a step does with them" }),
      el("ul", { class: "key" }, key("kept", "accepted: min(p, q)"), key("rejected", "rejected: q above p"), key("shortfall", "residual: p above q")),
      el("div", { class: "mass-row", "aria-hidden": "true" }, ...this.columns.map((column) => column.node)),
      this.text,
      el(
        "dl",
        { class: "figures" },
        el("div", {}, el("dt", { text: "Chance of acceptance α, the sum of min(p, q)" }), this.alpha),
        el("div", {}, el("dt", { text: "Total variation, 1 - α" }), this.variation),
      ),
      this.note,
    );
  }

  show({ p, q }, { accepted, rejected, shortfall, residual, alpha, variation }) {
    const highest = Math.max(...p, ...q);
    this.columns.forEach(({ node, parts }, i) => {
      node.hidden = i >= p.length;
      if (node.hidden) return;
      vary(parts.kept, { "--share": accepted[i] / highest });
      vary(parts.again, { "--share": accepted[i] / highest });
      vary(parts.rejected, { "--share": rejected[i] / highest });
      vary(parts.shortfall, { "--share": shortfall[i] / highest });
    });
    this.alpha.textContent = number(alpha);
    this.variation.textContent = number(variation);
    this.text.textContent = p
      .map((_, i) => `${this.names[i]}: accepted ${number(accepted[i])}, rejected ${number(rejected[i])}, residual mass ${number(shortfall[i])}`)
      .join("; ");
    if (residual === null) this.note.textContent = "p = q: nothing is ever rejected, and the residual is never needed.";
    else if (alpha < 1e-9) this.note.textContent = "Nothing in common: every draft is rejected, and the residual is p itself. Slow, and still right.";
    else this.note.textContent = `The rejected mass and the residual mass are the same ${percent(variation)}: a rejection happens just as often as p is short of something.`;
  }
}

/** The table: min(p, q) + (1 - alpha) residual = p, with numbers. */
export class Identity {
  constructor(names) {
    this.names = names;
    this.body = el("tbody");
    const heads = ["token", "p", "q", "min(1, p/q)", "min(p, q)", "residual", "(1 - α) residual", "sum: p"];
    this.node = el(
      "section",
      { class: "pane identity", "aria-labelledby": "identity-title" },
      el("h2", { id: "identity-title", text: "Why it is exact" }),
      el("p", { text: "A token comes out by being accepted, or by being drawn after a rejection. The two add up to p for every token, whatever q is: min(p, q) + (1 - α) · residual = p." }),
      el(
        "div",
        { class: "scroll", tabindex: "0", role: "region", "aria-label": "The identity with numbers" },
        el("table", {}, el("thead", {}, el("tr", {}, ...heads.map((text) => el("th", { scope: "col", text })))), this.body),
      ),
    );
  }

  show({ p, q }, { accepted, residual, variation }) {
    this.body.replaceChildren(
      ...p.map((value, i) => {
        const drawn = residual ? variation * residual[i] : 0;
        const ratio = q[i] > 0 ? number(Math.min(1, value / q[i])) : "–";
        const cells = [number(value), number(q[i]), ratio, number(accepted[i]), residual ? number(residual[i]) : "–", number(drawn)];
        return el(
          "tr",
          {},
          el("th", { scope: "row", text: this.names[i] }),
          ...cells.map((text) => el("td", { text })),
          el("td", { class: "total", text: number(accepted[i] + drawn) }),
        );
      }),
    );
  }
}
