/** The conversation: sending, stopping, comparing, and what the model is reminded of. */

import { Answer } from "./answer.js";
import { Comparison } from "./compare.js";
import { announce, byId, el } from "./dom.js";
import { clearNotice, showError, showNotice } from "./notice.js";
import { showReadings } from "./readings.js";
import { toRequest } from "./request.js";
import { Strip } from "./strip.js";
import { Meter } from "./meter.js";

const NEAR = 120; // pixels from the end that still count as reading along

export class Chat {
  constructor({ settings, details, askKey, connect }) {
    Object.assign(this, { settings, details, askKey, connect });
    this.model = null;
    this.turns = [];
    this.running = null;
    this.strip = new Strip();
    this.conversation = byId("conversation");
    this.following = true;
    for (const box of [this.conversation, document]) {
      box.addEventListener("scroll", () => (this.following = this.#hidden() < NEAR), { passive: true });
    }
    this.prompt = byId("prompt");
    byId("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      this.send();
    });
    this.prompt.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      this.send();
    });
    byId("compare").addEventListener("click", () => this.compare());
    byId("stop").addEventListener("click", () => this.running?.abort());
    byId("clear").addEventListener("click", () => this.clear());
  }

  send() {
    return this.#ask(async ({ turn, prompt, settings, signal }) => {
      const answer = new Answer(this.details);
      turn.append(answer.node);
      const on = this.#watch(answer.meter);
      await this.#finish(answer, () => answer.run(toRequest(this.model, this.turns, prompt, settings), { signal, on }));
      return answer;
    });
  }

  compare() {
    return this.#ask(async ({ turn, prompt, settings, signal }) => {
      const seed = settings.seed ?? Math.floor(Math.random() * 2 ** 31);
      const comparison = new Comparison(this.details);
      turn.append(comparison.node);
      const request = (off) => toRequest(this.model, this.turns, prompt, { ...settings, seed, off });
      const onDrafted = this.#watch(comparison.drafted.meter);
      const onPlain = () => this.#follow();
      await this.#finish(comparison.drafted, () => comparison.run(request, { signal, onDrafted, onPlain }));
      announce(comparison.verdict.textContent);
      return comparison.drafted;
    });
  }

  clear() {
    this.turns = [];
    for (const turn of this.conversation.querySelectorAll(".turn")) turn.remove();
    byId("welcome").hidden = false;
    clearNotice();
    this.strip.reset();
    this.details.reset();
    showReadings(new Meter(), { done: false });
    this.prompt.focus();
  }

  /** One request from the text in the box: the text goes into the conversation, and back into the box if nothing came of it. */
  async #ask(work) {
    const prompt = this.prompt.value;
    if (this.running) {
      showNotice("Still answering.", "Stop it first, or wait. Your text stays in the box.");
      return;
    }
    if (!prompt.trim()) {
      showNotice("Nothing to send.", "Write something first, or take an example.");
      this.prompt.focus();
      return;
    }
    const settings = this.settings.read();
    if (!settings || !(await this.#connected())) return;
    clearNotice();
    byId("welcome").hidden = true;
    const turn = el("article", { class: "turn" }, el("p", { class: "prompt", text: prompt }));
    this.conversation.append(turn);
    this.prompt.value = "";
    this.strip.reset();
    this.following = true;
    this.#follow();
    this.running = new AbortController();
    this.#busy(true);
    try {
      const answer = await work({ turn, prompt, settings, signal: this.running.signal });
      this.turns.push({ prompt, answer: answer.text });
    } catch (error) {
      this.#fail(error, { turn, prompt });
    } finally {
      this.running = null;
      this.#busy(false);
      this.#follow();
    }
  }

  async #connected() {
    if (!this.model) await this.connect();
    return this.model !== null;
  }

  /** Runs; a stop is an end like another. Then the line below the answer and the readings of all of it. */
  async #finish(answer, run) {
    let note = null;
    try {
      await run();
      announce(`Answer: ${answer.text}`);
    } catch (error) {
      note = error.name === "AbortError" ? "stopped" : "broke off";
      if (note === "broke off") throw error;
    } finally {
      if (note || !answer.caption.textContent) answer.close(note);
      showReadings(answer.meter, { done: true });
    }
  }

  #watch(meter) {
    return (step) => {
      this.strip.add(step);
      showReadings(meter, { done: false });
      this.#follow();
    };
  }

  #fail(error, { turn, prompt }) {
    const partly = turn.querySelector(".token") !== null;
    if (partly) turn.classList.add("failed");
    else turn.remove();
    byId("welcome").hidden = this.conversation.querySelector(".turn") !== null;
    if (!this.prompt.value) this.prompt.value = prompt;
    showError(error, { came: partly ? "part" : "nothing", retry: () => this.send(), askKey: this.askKey });
  }

  #busy(busy) {
    const focused = document.activeElement;
    byId("send").hidden = busy;
    byId("stop").hidden = !busy;
    byId("compare").disabled = byId("clear").disabled = busy;
    if (busy && focused === byId("send")) byId("stop").focus();
    if (!busy && (focused === byId("stop") || focused === document.body)) this.prompt.focus({ preventScroll: true });
  }

  /** Keeps the end in sight, unless the reader has scrolled away from it. */
  #follow() {
    const box = this.#scrollsItself() ? this.conversation : document.scrollingElement;
    if (this.following) box.scrollTop += Math.max(0, this.#hidden());
  }

  /** How many pixels of the conversation's end are out of sight. */
  #hidden() {
    const { scrollHeight, scrollTop, clientHeight } = this.conversation;
    if (this.#scrollsItself()) return scrollHeight - scrollTop - clientHeight;
    return this.conversation.getBoundingClientRect().bottom - byId("dock").getBoundingClientRect().top;
  }

  /** Where there is room the conversation scrolls by itself, on a small screen the page does. */
  #scrollsItself() {
    return getComputedStyle(this.conversation).overflowY === "auto";
  }
}
