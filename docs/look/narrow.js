// Tells the cells of a table their headings, which narrow.css shows on a phone.
for (const table of document.querySelectorAll(".md-typeset table")) {
  const headings = [...table.querySelectorAll("thead th")].map((cell) => cell.textContent.trim());
  if (!headings.length) continue;
  table.dataset.rows = "";
  table.setAttribute("role", "table");
  for (const row of table.rows) {
    row.setAttribute("role", "row");
    for (const cell of row.cells) {
      cell.setAttribute("role", cell.tagName === "TH" ? "columnheader" : "cell");
      if (cell.tagName === "TH") continue;
      cell.dataset.heading = headings[cell.cellIndex] ?? "";
      // One child, so that the heading has one neighbour in the grid.
      const held = document.createElement("div");
      held.append(...cell.childNodes);
      cell.append(held);
    }
  }
}
