// The theme: light, dark, or the machine's. Not a module: it runs before the first paint, so that nothing flashes.

(() => {
  const KEY = "blockdraft.theme";
  const dark = matchMedia("(prefers-color-scheme: dark)");
  let choice = "system";

  function show() {
    const theme = choice === "system" ? (dark.matches ? "dark" : "light") : choice;
    document.documentElement.dataset.theme = theme;
    dispatchEvent(new Event("themechange"));
  }

  try {
    choice = localStorage.getItem(KEY) ?? "system";
  } catch {
    // Storage is forbidden: use the machine's theme.
  }
  dark.addEventListener("change", show);
  show();

  document.addEventListener("DOMContentLoaded", () => {
    for (const radio of document.querySelectorAll('input[name="theme"]')) {
      radio.checked = radio.value === choice;
      radio.addEventListener("change", () => {
        choice = radio.value;
        try {
          localStorage.setItem(KEY, choice);
        } catch {
          // Storage is forbidden: the choice lasts until the page is left.
        }
        show();
      });
    }
  });
})();
