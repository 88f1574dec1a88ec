/** The controls beside the conversation: filled from the model's facts, read as one value. */

import { byId, el } from "./dom.js";
import { count } from "./format.js";

const NUMBERS = { temperature: "Temperature", seed: "Seed", "max-tokens": "Max tokens", "max-draft": "Max draft" };

export class Settings {
  constructor() {
    this.lossy = [];
    const number = byId("temperature");
    const range = byId("temperature-range");
    range.addEventListener("input", () => (number.value = range.value));
    number.addEventListener("input", () => (range.value = number.value));
    byId("speculate").addEventListener("change", () => this.#toggle());
    byId("rule").addEventListener("change", () => this.#note());
    byId("settings").addEventListener("submit", (event) => event.preventDefault());
    byId("settings").addEventListener("input", () => this.#check());
  }

  /** facts: the `truedraw` part of /v1/models. */
  fill(facts) {
    this.lossy = facts.lossy_rules;
    byId("drafter").replaceChildren(...facts.drafters.map((name) => el("option", { text: name, value: name })));
    byId("drafter").value = facts.drafter;
    const exact = el("optgroup", { label: "Exact" }, ...facts.rules.map((name) => el("option", { text: name, value: name })));
    const lossy = el(
      "optgroup",
      { label: "Lossy: changes the law" },
      ...facts.lossy_rules.map((name) => el("option", { text: `${name} (lossy)`, value: name })),
    );
    byId("rule").replaceChildren(exact, ...(facts.lossy_rules.length ? [lossy] : []));
    byId("max-tokens").max = facts.context;
    const list = [
      ["Context", `${count(facts.context)} tokens`],
      ["Vocabulary", count(facts.vocab_size)],
      ["At a time", `${count(facts.slots)} ${facts.slots === 1 ? "answer" : "answers"}`],
      ["Rows", facts.strict ? "bit-identical for every pass" : "may differ with the pass size"],
    ];
    byId("model-facts").replaceChildren(
      ...list.map(([name, value]) => el("div", {}, el("dt", { text: name }), el("dd", { text: value }))),
    );
    this.#note();
  }

  /**
   * {off, drafter, rule, temperature, seed, maxTokens, maxDraft}; seed and maxDraft are null when left empty.
   * Returns null, and says why beside the controls, if one of them cannot be used.
   */
  read() {
    if (!this.#check()) {
      byId("settings-pane").open = true;
      byId("settings").querySelector(":invalid").focus();
      return null;
    }
    const number = (id) => (byId(id).value === "" ? null : byId(id).valueAsNumber);
    return {
      off: !byId("speculate").checked,
      drafter: byId("drafter").value || null,
      rule: byId("rule").value || "auto",
      temperature: number("temperature"),
      seed: number("seed"),
      maxTokens: number("max-tokens"),
      maxDraft: number("max-draft"),
    };
  }

  #check() {
    byId("temperature").required = byId("max-tokens").required = true;
    const wrong = byId("settings").querySelector(":invalid");
    byId("settings-error").textContent = wrong ? `${NUMBERS[wrong.id]}: ${wrong.validationMessage}` : "";
    return wrong === null;
  }

  #toggle() {
    for (const id of ["drafter", "rule", "max-draft"]) byId(id).disabled = !byId("speculate").checked;
  }

  #note() {
    const rule = byId("rule").value;
    const lossy = this.lossy.includes(rule);
    byId("rule-note").classList.toggle("wrong", lossy);
    byId("rule-note").textContent = lossy
      ? "Lossy: answers no longer have exactly the model's law. How far each moved is shown below it."
      : rule === "auto"
        ? "Exact. With a seed the text is that of plain decoding."
        : "Exact: answers have the model's law.";
  }
}
