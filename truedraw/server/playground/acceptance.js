/** How acceptance works: two rows to edit, what a step makes of them, and draws against p. */

import { el } from "./dom.js";
import { distance, draw, resize, split, withValue } from "./law.js";
import { DrawResult } from "./drawn.js";
import { Identity, MassPicture } from "./masses.js";
import { RowEdit } from "./rowedit.js";

const NAMES = ["a", "b", "c", "d", "e", "f"];

const PRESETS = {
  "good drafter": { p: [0.5, 0.25, 0.15, 0.07, 0.03], q: [0.45, 0.3, 0.1, 0.1, 0.05] },
  "bad drafter": { p: [0.5, 0.25, 0.15, 0.07, 0.03], q: [0.05, 0.1, 0.15, 0.3, 0.4] },
  "one-hot copy": { p: [0.7, 0.15, 0.08, 0.05, 0.02], q: [1, 0, 0, 0, 0] },
  "p = q": { p: [0.4, 0.3, 0.15, 0.1, 0.05], q: [0.4, 0.3, 0.15, 0.1, 0.05] },
  disjoint: { p: [0.6, 0.4, 0, 0, 0], q: [0, 0, 0.5, 0.3, 0.2] },
};

/** Builds the view inside `root`. random() is uniform in [0, 1). */
export function startAcceptance(root, random = Math.random) {
  const rows = structuredClone(PRESETS["good drafter"]);
  const editors = Object.fromEntries(
    Object.entries({ p: "the target's row: the law the answer must have", q: "the drafter's row: what the draft is drawn from" }).map(
      ([sign, title]) => [sign, new RowEdit({ sign, title, names: NAMES, changed: (i, value) => change(sign, i, value) })],
    ),
  );
  const picture = new MassPicture(NAMES);
  const identity = new Identity(NAMES);
  const result = new DrawResult(NAMES);
  let counts = [];

  function change(sign, i, value) {
    if (Number.isFinite(value)) rows[sign] = withValue(rows[sign], i, value);
    update();
  }

  function update() {
    const parts = split(rows.p, rows.q);
    editors.p.show(rows.p);
    editors.q.show(rows.q);
    picture.show(rows, parts);
    identity.show(rows, parts);
    counts = rows.p.map(() => 0);
    result.reset(rows.p);
  }

  function drawMany(times) {
    const parts = split(rows.p, rows.q);
    let last = null;
    for (let i = 0; i < times; i += 1) {
      last = draw(rows.p, rows.q, parts, random);
      counts[last.token] += 1;
    }
    result.show({ rows, counts, ...distance(counts, rows.p) }, times === 1 ? last : null);
  }

  function take({ p, q }) {
    Object.assign(rows, structuredClone({ p, q }));
    size.value = String(p.length);
    update();
  }

  const size = el(
    "select",
    {
      id: "row-size",
      on: {
        change: () => {
          for (const sign of ["p", "q"]) rows[sign] = resize(rows[sign], Number(size.value));
          update();
        },
      },
    },
    ...[4, 5, 6].map((n) => el("option", { value: String(n), text: String(n) })),
  );
  const preset = (name) => el("button", { type: "button", text: name, on: { click: () => take(PRESETS[name]) } });
  const button = (text, run) => el("button", { type: "button", class: "main", text, on: { click: run } });

  root.append(
    el(
      "div",
      { class: "intro" },
      el("h2", { text: "Guess from q, answer with the law p" }),
      el("p", {}, "The drafter draws a token x from q. The target keeps it with probability ", el("b", { text: "min(1, p(x)/q(x))" }), ". If it is rejected, a token is drawn from the ", el("b", { text: "residual" }), ", max(p - q, 0) normalised. What comes out has exactly the law p, however bad the drafter is: only the speed depends on it. Pull the bars and see."),
      el(
        "div",
        { class: "intro-controls" },
        el("div", { class: "presets", role: "group", "aria-label": "Examples" }, ...Object.keys(PRESETS).map(preset)),
        el("div", { class: "field" }, el("label", { for: "row-size", text: "Tokens" }), size),
      ),
    ),
    el("div", { class: "pane editors" }, editors.p.node, editors.q.node, el("p", { class: "hint", text: "Drag a bar, use its arrow keys, or type a number. The others are scaled, so that a row always adds up to 1." })),
    picture.node,
    identity.node,
    el(
      "section",
      { class: "pane drawn", "aria-labelledby": "draw-title" },
      el("h2", { id: "draw-title", text: "Draw" }),
      el("div", { class: "presets" }, button("Draw one step", () => drawMany(1)), button("Draw 1,000", () => drawMany(1000)), el("button", { type: "button", text: "Start over", on: { click: update } })),
      result.node,
    ),
  );
  take(PRESETS["good drafter"]);
}
