/** A row of probabilities as bars: dragged, moved by keys (role slider), or typed as numbers. */

import { el, vary } from "./dom.js";

const KEYS = { ArrowUp: 0.01, ArrowRight: 0.01, ArrowDown: -0.01, ArrowLeft: -0.01, PageUp: 0.1, PageDown: -0.1 };

/** names: of the tokens; sign: "p" or "q"; changed(i, value): asks for a new value of token i. */
export class RowEdit {
  constructor({ sign, title, names, changed }) {
    this.sign = sign;
    this.changed = changed;
    this.columns = names.map((name, i) => this.#column(name, i));
    this.node = el(
      "fieldset",
      { class: `row-edit row-${sign}` },
      el("legend", {}, el("b", { text: sign }), ` ${title}`),
      el("div", { class: "columns" }, ...this.columns.map((column) => column.node)),
    );
  }

  show(row) {
    this.columns.forEach(({ node, slider, number }, i) => {
      node.hidden = i >= row.length;
      if (node.hidden) return;
      vary(slider, { "--share": row[i] });
      slider.setAttribute("aria-valuenow", row[i].toFixed(2));
      if (document.activeElement !== number) number.value = row[i].toFixed(2);
    });
    this.row = row;
  }

  #column(name, i) {
    const slider = el(
      "div",
      {
        class: "pull",
        role: "slider",
        tabindex: "0",
        "aria-label": `${this.sign} of ${name}`,
        "aria-orientation": "vertical",
        "aria-valuemin": "0",
        "aria-valuemax": "1",
        "aria-valuenow": "0",
        on: { keydown: (event) => this.#key(event, i), pointerdown: (event) => this.#grab(event, i) },
      },
      el("i", { class: "level" }),
    );
    const number = el("input", {
      type: "number",
      min: "0",
      max: "1",
      step: "0.01",
      "aria-label": `${this.sign} of ${name}, number`,
      on: {
        change: () => {
          if (number.value !== "") this.changed(i, number.valueAsNumber);
          number.value = this.row[i].toFixed(2);
        },
      },
    });
    return { node: el("div", { class: "pull-column" }, slider, el("span", { class: "name", text: name }), number), slider, number };
  }

  #key(event, i) {
    const to = { Home: 0, End: 1 }[event.key] ?? (KEYS[event.key] === undefined ? undefined : this.row[i] + KEYS[event.key]);
    if (to === undefined) return;
    event.preventDefault();
    this.changed(i, to);
  }

  #grab(event, i) {
    const slider = event.currentTarget;
    const box = slider.getBoundingClientRect();
    const set = (moved) => this.changed(i, (box.bottom - moved.clientY) / box.height);
    const release = () => {
      slider.removeEventListener("pointermove", set);
      slider.removeEventListener("pointerup", release);
      slider.removeEventListener("pointercancel", release);
    };
    event.preventDefault();
    slider.focus({ preventScroll: true });
    slider.setPointerCapture(event.pointerId);
    slider.addEventListener("pointermove", set);
    slider.addEventListener("pointerup", release);
    slider.addEventListener("pointercancel", release);
    set(event);
  }
}
