/** One answer of the model: its tokens, its counts and the line below it. */

import * as api from "./api.js";
import { el } from "./dom.js";
import * as format from "./format.js";
import { Meter } from "./meter.js";
import { TokenText } from "./tokens.js";

export class Answer {
  constructor(details, label) {
    this.text = "";
    this.finish = null;
    this.view = new TokenText(details, label);
    this.meter = new Meter();
    this.caption = el("p", { class: "caption hint" });
    this.node = el("div", { class: "answer busy" }, this.view.node, this.caption);
  }

  /** Asks and shows what comes; on(step) after each step. What had come before an error stays. */
  async run({ path, body }, { signal, on }) {
    try {
      for await (const chunk of api.answer(path, body, signal)) this.#take(chunk, on);
    } finally {
      this.view.finish();
      this.node.classList.remove("busy");
    }
  }

  #take({ text, step, tokens, finish, summary }, on) {
    this.text += text;
    for (const token of tokens) this.view.add(token);
    if (!this.view.tokens.length && text) this.view.addPlain(text);
    this.finish = finish ?? this.finish;
    if (summary) this.meter.summary = summary;
    if (step) {
      this.meter.add(step);
      on(step);
    }
  }

  /** Fills the line below the answer. note: what the reader should know of its end ("stopped", ...). */
  close(note = null) {
    const { summary } = this.meter;
    const { speed, ratio } = this.meter.speeds({ now: false });
    const parts = [
      note ?? (this.finish === "length" ? "cut at max tokens" : null),
      summary && (this.meter.proposed ? `${summary.drafter}, rule ${summary.rule}` : "nothing drafted"),
      this.meter.steps.length ? `${format.plural(this.meter.tokens, "token")} in ${format.plural(this.meter.steps.length, "step")}` : null,
      speed === null ? null : format.speed(speed),
      ratio === null || !this.meter.proposed ? null : `${format.ratio(ratio)} plain, estimated`,
    ];
    this.caption.textContent = parts.filter(Boolean).join(" · ");
    if (summary?.drift) this.node.append(drift(summary.drift));
  }
}

function drift({ total_variation: variation, kl_divergence: divergence, bound }) {
  const text = `Not the model's own law: this answer moved by at most ${format.probability(bound)} in total variation (over its steps, TV adds up to ${variation.toFixed(3)}, KL to ${divergence.toFixed(3)} nats).`;
  return el("p", { class: "drift", text });
}
