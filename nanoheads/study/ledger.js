"use strict";
const $ = id => document.getElementById(id);
const table = $("ledger"), entries = [...table.tBodies], heads = [...table.tHead.rows[0].cells];
const filters = ["verdict", "size", "text", "recipe", "stage", "code"].map($);
const direction = { ascending: 1, descending: -1 };
const words = entry => `${entry.rows[0].textContent} ${entry.dataset.file}`.toLowerCase();
let sorted = null;  // [column, "ascending" or "descending"]

// ---- sorting ----

function compare(a, b, column) {  // what is unknown stands last, whichever way
  const [x, y] = [a, b].map(entry => entry.rows[0].cells[column].dataset.sort);
  if (!x || !y) return !x - !y;
  const [way, both] = [direction[sorted[1]], [Number(x), Number(y)]];
  return way * (both.some(Number.isNaN) ? x.localeCompare(y) : both[0] - both[1]);
}

function sort(column, way) {
  sorted = column === null ? null : [column, way];
  heads.forEach((head, i) => head.setAttribute("aria-sort", sorted && i == column ? way : "none"));
  $("sort").value = column ?? "";
  $("turn").setAttribute("aria-pressed", sorted !== null && way == "descending");
  table.append(...(sorted ? [...entries].sort((a, b) => compare(a, b, column)) : entries));
}

heads.forEach((head, i) => head.firstChild.onclick = () =>
  sort(i, head.getAttribute("aria-sort") == "ascending" ? "descending" : "ascending"));
$("sort").onchange = event =>
  event.target.value ? sort(Number(event.target.value), "ascending") : sort(null);
$("turn").onclick = () =>
  sorted && sort(sorted[0], sorted[1] == "ascending" ? "descending" : "ascending");

// ---- filters ----

function filter() {
  const asked = $("search").value.toLowerCase().split(/\s+/).filter(Boolean);
  const chosen = filters.filter(choice => choice.value);
  let shown = 0;
  for (const entry of entries) {
    const text = words(entry);
    entry.hidden = !(asked.every(word => text.includes(word))
      && chosen.every(choice => entry.dataset[choice.id] == choice.value));
    shown += !entry.hidden;
  }
  $("count").textContent = `${shown} of ${entries.length} rows`;
}

$("controls").oninput = filter;
$("controls").onsubmit = event => event.preventDefault();
$("controls").onreset = () => setTimeout(() => { sort(null); filter(); });

// ---- ages, and a row that a link leads to ----

for (const time of table.querySelectorAll("time")) {
  const days = Math.floor((Date.now() - Date.parse(time.dateTime)) / 864e5);
  if (days >= 0) time.parentNode.querySelector("small").append(`, ${days} day${days == 1 ? "" : "s"} old`);
}

function open() {
  const entry = entries.find(each => each.id == decodeURIComponent(location.hash.slice(1)));
  if (!entry) return;
  entry.querySelector("details").open = true;
  entry.scrollIntoView();
}
onhashchange = open;

$("controls").hidden = false;
filter();
open();
