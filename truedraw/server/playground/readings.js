/** The instrument beside the conversation: a meter's numbers, drawn. */

import { byId, el, vary } from "./dom.js";
import * as format from "./format.js";

const LOW = 0.5;
const HIGH = 4;
const SHOWN_DEPTHS = 12;

/** done: false shows the last second of decoding, true the whole answer. */
export function showReadings(meter, { done }) {
  const { speed, plain, ratio } = meter.speeds({ now: !done });
  const set = (id, value, write) => (byId(id).textContent = value === null ? "–" : write(value));
  set("ratio", ratio, format.ratio);
  byId("tape-ratio").textContent = ratio === null ? "" : format.ratio(ratio);
  set("speed", speed, format.speed);
  set("plain-speed", plain, format.speed);
  set("tokens-per-step", meter.tokensPerStep, (value) => value.toFixed(2));
  set("kept", meter.proposed || null, (proposed) => `${format.percent(meter.accepted / proposed)} of ${format.count(proposed)}`);
  byId("speed-label").textContent = done ? "Whole answer" : "Now";
  showGauge(ratio);
  showDepths(meter.acceptanceByDepth);
}

/** Ratios lie on a logarithmic scale from a half to four, so that half as fast is as far from 1 as twice as fast. */
function showGauge(ratio) {
  const place = (value) => Math.log(Math.min(Math.max(value, LOW), HIGH) / LOW) / Math.log(HIGH / LOW);
  const needle = byId("gauge-needle");
  needle.hidden = ratio === null;
  const at = place(ratio ?? 1);
  vary(needle, { "--at": at });
  vary(byId("gauge-fill"), { "--from": Math.min(at, place(1)), "--to": Math.max(at, place(1)) });
  byId("gauge-fill").classList.toggle("slower", ratio !== null && ratio < 1);
}

function showDepths(shares) {
  const list = byId("depths");
  if (!shares.length) {
    list.replaceChildren(el("li", { class: "hint", text: "No drafts yet." }));
    return;
  }
  list.replaceChildren(
    ...shares.slice(0, SHOWN_DEPTHS).map((share, depth) =>
      el(
        "li",
        { title: `Depth ${depth + 1}: ${format.percent(share)}` },
        el("span", { class: "unseen", text: `Depth ${depth + 1}: ${format.percent(share)}` }),
        el("span", { class: "column", "aria-hidden": "true" }, vary(el("i"), { "--share": share })),
        el("span", { class: "depth", "aria-hidden": "true", text: depth + 1 }),
      ),
    ),
  );
}
