// Runs before the page is drawn, so that a remembered theme does not flash. Without one, the system decides.
"use strict";

(() => {
  const KEY = "quantkit.theme";
  const root = document.documentElement;
  const dark = matchMedia("(prefers-color-scheme: dark)");

  function remembered() {
    try {
      return localStorage.getItem(KEY);
    } catch {
      return null; // storage is switched off in this browser
    }
  }

  function apply() {
    root.dataset.theme = remembered() ?? (dark.matches ? "dark" : "light");
    const button = document.getElementById("theme");
    button?.setAttribute("aria-pressed", String(root.dataset.theme === "dark"));
  }

  function toggle() {
    const next = root.dataset.theme === "dark" ? "light" : "dark";
    try {
      localStorage.setItem(KEY, next);
      apply();
    } catch {
      root.dataset.theme = next;
    }
  }

  apply();
  dark.addEventListener("change", apply);
  document.addEventListener("DOMContentLoaded", () => {
    apply();
    document.getElementById("theme").addEventListener("click", toggle);
  });
})();
