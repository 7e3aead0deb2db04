"use strict";
// A click on a column's name sorts by it; a second click turns the order round.
for (const button of document.querySelectorAll("th button")) {
  button.addEventListener("click", () => {
    const head = button.parentElement;
    const body = head.closest("table").tBodies[0];
    const column = [...head.parentElement.children].indexOf(head);
    const order = head.getAttribute("aria-sort") === "ascending" ? "descending" : "ascending";
    for (const other of head.parentElement.children) other.setAttribute("aria-sort", "none");
    head.setAttribute("aria-sort", order);
    const key = (row) => {
      const cell = row.cells[column];
      return "value" in cell.dataset ? Number(cell.dataset.value) : cell.textContent.trim();
    };
    const compare = (a, b) => {
      const [x, y] = [key(a), key(b)];
      if (x === "" || y === "") return (x === "") - (y === "");
      const difference = typeof x === "number" && typeof y === "number"
        ? x - y : String(x).localeCompare(String(y), "en", { numeric: true });
      return order === "ascending" ? difference : -difference;
    };
    body.append(...[...body.rows].sort(compare));
  });
}
// What is folded away on the screen belongs on paper.
addEventListener("beforeprint", () => {
  for (const details of document.querySelectorAll("details")) details.open = true;
});
