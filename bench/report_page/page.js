// A heading is a button, so that the keyboard reaches it.
for (const head of document.querySelectorAll("thead th")) {
  const button = document.createElement("button");
  button.append(...head.childNodes);
  head.append(button);
}
// Sort the rows of a table by the column whose heading is clicked: numbers by their value, before words.
document.addEventListener("click", event => {
  const head = event.target.closest("thead th");
  if (!head) return;
  const body = head.closest("table").tBodies[0], column = head.cellIndex;
  const down = head.getAttribute("aria-sort") === "ascending";
  const value = row => {
    const cell = row.cells[column];
    if (!cell) return "";
    const text = cell.textContent.replaceAll(",", "").trim(), number = parseFloat(text);
    return Number.isNaN(number) ? text : number;
  };
  const rows = [...body.rows].map(row => [value(row), row]);
  rows.sort(([a], [b]) => typeof a !== typeof b ? (typeof a === "number" ? -1 : 1)
    : typeof a === "number" ? a - b : a.localeCompare(b));
  if (down) rows.reverse();
  for (const other of head.parentNode.cells) other.removeAttribute("aria-sort");
  head.setAttribute("aria-sort", down ? "descending" : "ascending");
  body.append(...rows.map(([, row]) => row));
});
