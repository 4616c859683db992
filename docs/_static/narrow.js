// Gives cells the names of their columns, which narrow.css shows where a row is a block of lines.
document.addEventListener("DOMContentLoaded", () => {
  for (const table of document.querySelectorAll("table.docutils")) {
    const columns = [...table.querySelectorAll("th")].map((head) => head.textContent.trim());
    if (columns.length < 2 || columns.length > 4) continue;
    for (const row of table.querySelectorAll("tbody tr"))
      [...row.cells].forEach((cell, number) => {
        if (columns[number] && cell.textContent.trim()) cell.dataset.column = columns[number];
      });
  }
});
