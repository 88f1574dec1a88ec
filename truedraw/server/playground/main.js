/** Starts the page: theme, key, tabs, the model's facts, the conversation and the page about acceptance. */

import { startAcceptance } from "./acceptance.js";
import * as api from "./api.js";
import { Chat } from "./chat.js";
import { Details } from "./details.js";
import { byId, el } from "./dom.js";
import { clearNotice, showError } from "./notice.js";
import { Settings } from "./settings.js";
import { startTabs } from "./tabs.js";

const CHAT_EXAMPLES = [
  "Write this list out three times: red, green, blue.",
  "Name the planets in order, then in the opposite order.",
  "What is gravity?",
];
const PLAIN_EXAMPLES = ["the cat sat on", "1, 2, 3, 4, 1, 2, 3,", "a dog and a cat"];

const settings = new Settings();
const chat = new Chat({ settings, details: new Details(), askKey, connect });

async function connect() {
  try {
    chat.model = await api.model();
    clearNotice();
    showModel(chat.model);
  } catch (error) {
    byId("model").textContent = "no model";
    showError(error, { retry: connect, came: "none", askKey: () => askKey({ focus: false }) });
  }
}

function showModel({ id, truedraw }) {
  byId("model").textContent = id;
  byId("model").title = id;
  settings.fill(truedraw);
  byId("prompt").placeholder = truedraw.chat ? "Ask something" : "Begin a text";
  byId("prompt-label").textContent = truedraw.chat ? "Message" : "Text to continue";
  byId("composer-hint").classList.toggle("matters", !truedraw.chat || truedraw.steady_stream);
  byId("composer-hint").textContent = [
    truedraw.chat ? "" : "This model has no chat template: it continues your text as it stands.",
    truedraw.steady_stream ? "This server hides its pace: answers come whole." : "",
    "Enter sends, Shift+Enter starts a line.",
  ].join(" ");
  const fill = (text) => {
    byId("prompt").value = text;
    byId("prompt").focus();
  };
  byId("examples").replaceChildren(
    ...(truedraw.chat ? CHAT_EXAMPLES : PLAIN_EXAMPLES).map((text) =>
      el("button", { type: "button", text, on: { click: () => fill(text) } }),
    ),
  );
}

function askKey({ focus = true } = {}) {
  byId("key-row").hidden = false;
  byId("key-button").setAttribute("aria-expanded", "true");
  if (focus) byId("key").focus();
}

function startKey() {
  byId("key-button").addEventListener("click", () => {
    if (byId("key-row").hidden) return askKey();
    byId("key-row").hidden = true;
    byId("key-button").setAttribute("aria-expanded", "false");
  });
  byId("key-row").addEventListener("submit", (event) => {
    event.preventDefault();
    api.key.set(byId("key").value);
    byId("key-button").click();
    byId("prompt").focus();
    connect();
  });
  byId("key").value = api.key.get();
}

function startTheme() {
  const themes = ["auto", "light", "dark"];
  const button = byId("theme-button");
  const show = (theme) => {
    if (theme === "auto") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = theme;
    button.textContent = `Theme: ${theme}`;
  };
  let theme = document.documentElement.dataset.theme ?? "auto";
  show(theme);
  button.addEventListener("click", () => {
    theme = themes[(themes.indexOf(theme) + 1) % themes.length];
    show(theme);
    try {
      localStorage.setItem("truedraw-theme", theme);
    } catch {
      // storage is switched off: the choice holds until the page is left
    }
  });
}

/** Side panes are always open where there is room for them, and folded on a small screen. */
function startPanes() {
  const wide = matchMedia("(min-width: 64rem)");
  const fold = () => {
    for (const pane of document.querySelectorAll("details.pane")) pane.open = wide.matches;
  };
  wide.addEventListener("change", fold);
  fold();
}

startTheme();
startKey();
startPanes();
startAcceptance(byId("view-acceptance"));
startTabs([byId("tab-chat"), byId("tab-acceptance")], (id) => document.body.classList.toggle("reading", id === "tab-acceptance"));
connect();
