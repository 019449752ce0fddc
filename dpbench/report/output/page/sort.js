// Tables sort by a click on a heading: numbers by their value and unit, words after them. Rows are filtered by the words
// in a box: a row stays that has each of them; -word: that has it not. Without this script, all is there.
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

function filterBy(box, body, count) {
  const words = box.value.toLowerCase().split(/\s+/).filter(Boolean);
  let shown = 0;
  for (const row of body.rows) {
    const text = Array.from(row.cells, (cell) => cell.textContent).join("\n").toLowerCase();
    row.hidden = !words.every((word) => (/^-./.test(word) ? !text.includes(word.slice(1)) : text.includes(word)));
    shown += !row.hidden;
  }
  count.value = words.length ? `${shown} of ${body.rows.length} rows` : "";
}

for (const table of document.querySelectorAll("table.sortable")) {
  const body = table.tBodies[0];
  if (body.rows.length < 5) continue; // seen at a glance
  const [line, box, count] = ["p", "input", "output"].map((tag) => document.createElement(tag));
  line.className = "filter";
  Object.assign(box, { type: "search", placeholder: "filter rows: words, -word to leave out" });
  box.setAttribute("aria-label", `Filter rows. ${table.parentNode.getAttribute("aria-label")}`);
  box.addEventListener("input", () => filterBy(box, body, count));
  line.append(box, count);
  table.parentNode.before(line);
}
