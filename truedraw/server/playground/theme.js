// Before the first paint: the theme that was chosen here last. Not a module, because modules wait for the page.
try {
  const theme = localStorage.getItem("truedraw-theme");
  if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
} catch {
  // storage is switched off: the theme of the system
}
