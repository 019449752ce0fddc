// Tables sort by a click on a heading, numbers by their value and unit, words after them; a field above a long table
// keeps the rows that have all of its words. Without this, all is there.
"use strict";
const UNITS = {
  "µs": 1e-6, ms: 1e-3, s: 1, B: 1, KiB: 2 ** 10, MiB: 2 ** 20, GiB: 2 ** 30, "%": 1, "×": 1, "": 1,
};
const NUMBER = /^[^\d\-–a-z]{0,4}(?:[a-zσεδ]+ = )?(-?(?:\d[\d,]*)(?:\.\d+)?(?:e[-+]?\d+)?)\s*([^\s,;–(]*)/i;

function value(row, column) {
  const text = row.cells[column].textContent.trim();
  if (/^(inf|∞)$/.test(text)) return [0, Infinity, text];
  const found = text.match(NUMBER);
  if (text === "" || text === "–") return [2, 0, ""];
  if (!found) return [1, 0, text];
  return [0, Number(found[1].replaceAll(",", "")) * (UNITS[found[2]] ?? 1), text];
}

function compare(a, b, way) {
  if (a[0] !== b[0]) return a[0] - b[0]; // words and empty cells last, whichever way
  return way * (a[1] - b[1] || a[2].localeCompare(b[2], undefined, { numeric: true }));
}

function sortBy(heading) {
  const way = heading.getAttribute("aria-sort") === "ascending" ? -1 : 1;
  for (const other of heading.parentNode.cells) other.removeAttribute("aria-sort");
  heading.setAttribute("aria-sort", way === 1 ? "ascending" : "descending");
  const body = heading.closest("table").tBodies[0];
  const keyed = Array.from(body.rows, (row) => [value(row, heading.cellIndex), row]);
  keyed.sort((a, b) => compare(a[0], b[0], way));
  body.append(...keyed.map(([, row]) => row));
}

for (const heading of document.querySelectorAll("table.sortable thead th")) {
  const button = document.createElement("button");
  button.append(...heading.childNodes);
  button.addEventListener("click", () => sortBy(heading));
  heading.append(button);
}

for (const table of document.querySelectorAll("table.sortable")) {
  const rows = Array.from(table.tBodies[0].rows, (row) => [row, [...row.cells].map((cell) => cell.textContent).join(" ").toLowerCase()]);
  if (rows.length < 9) continue;
  const field = document.createElement("input");
  field.type = "search";
  field.className = "filter";
  field.placeholder = `Filter ${rows.length} rows by words`;
  field.setAttribute("aria-label", field.placeholder);
  field.addEventListener("input", () => {
    const words = field.value.toLowerCase().split(/\s+/);
    for (const [row, text] of rows) row.hidden = !words.every((word) => text.includes(word));
  });
  table.closest(".table").before(field);
}
