/** Building elements without a line of HTML in strings: texts of the model are only ever text nodes. */

/**
 * A new element. Attributes: `class`, `text`, `on` ({event: handler}), `data` ({name: value}), and any other by its name;
 * null, undefined and false leave one out. Children: nodes or strings.
 */
export function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "text") node.textContent = value;
    else if (name === "on") for (const [event, handler] of Object.entries(value)) node.addEventListener(event, handler);
    else if (name === "data") Object.assign(node.dataset, value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

/** Sets CSS variables of an element: {"--share": 0.4}. */
export function vary(node, variables) {
  for (const [name, value] of Object.entries(variables)) node.style.setProperty(name, value);
  return node;
}

export const byId = (id) => document.getElementById(id);

/** Says a text to screen readers, without a sight of it. */
export function announce(text) {
  byId("announce").textContent = text;
}
