/** The two views as tabs: arrows move between them, the address keeps the one that is open. */

export function startTabs(tabs, opened) {
  const open = (tab, focus) => {
    for (const one of tabs) {
      const selected = one === tab;
      one.setAttribute("aria-selected", String(selected));
      one.tabIndex = selected ? 0 : -1;
      document.getElementById(one.getAttribute("aria-controls")).hidden = !selected;
    }
    if (focus) tab.focus();
    history.replaceState(null, "", tab === tabs[0] ? location.pathname + location.search : `#${tab.id.replace("tab-", "")}`);
    opened(tab.id);
  };
  tabs.forEach((tab, at) => {
    tab.addEventListener("click", () => open(tab, false));
    tab.addEventListener("keydown", (event) => {
      const to = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: tabs.length - 1 }[event.key];
      if (to === undefined) return;
      event.preventDefault();
      open(tabs[(to + tabs.length) % tabs.length], true);
    });
  });
  open(tabs.find((tab) => location.hash === `#${tab.id.replace("tab-", "")}`) ?? tabs[0], false);
}
