// Sets the remembered theme before anything is drawn, so that the page does not flash.
(function () {
  "use strict";
  let theme = null;
  try {
    theme = JSON.parse(window.localStorage.getItem("onstep") || "{}").theme;
  } catch {
    theme = null; // storage is off, or holds something else
  }
  if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
})();
