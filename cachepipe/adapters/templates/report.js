"use strict";
(() => {
  const search = document.getElementById("filter");
  const onlyMisses = document.getElementById("only-misses");
  const zoom = document.getElementById("zoom");
  const shown = document.getElementById("shown");
  const rows = Array.from(document.querySelectorAll("[data-text]"));
  const toggle = (button) => button.setAttribute("aria-pressed", String(button.getAttribute("aria-pressed") !== "true"));
  const isOn = (button) => button.getAttribute("aria-pressed") === "true";
  const apply = () => {
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    let count = 0;
    for (const row of rows) {
      const fits = words.every((word) => row.dataset.text.toLowerCase().includes(word));
      row.hidden = !(fits && (!isOn(onlyMisses) || row.dataset.miss === "1"));
      count += row.hidden ? 0 : 1;
    }
    shown.textContent = count === rows.length ? "" : `${count} of ${rows.length} rows`;
  };
  search.addEventListener("input", apply);
  onlyMisses.addEventListener("click", () => { toggle(onlyMisses); apply(); });
  zoom.addEventListener("click", () => {
    toggle(zoom);
    document.body.classList.toggle("zoomed", isOn(zoom));
  });
})();
