"use strict";
// A click on a column's name sorts by it; a second click turns the order round.
const valueOf = (cell) => {
  const text = cell ? cell.textContent.trim() : "";
  const number = Number(text.replaceAll(",", ""));
  return text === "" || Number.isNaN(number) ? text : number;
};
const sortBy = (head) => {
  const body = head.closest("table").tBodies[0];
  const column = [...head.parentElement.children].indexOf(head);
  const order = head.getAttribute("aria-sort") === "ascending" ? "descending" : "ascending";
  for (const other of head.parentElement.children) other.setAttribute("aria-sort", "none");
  head.setAttribute("aria-sort", order);
  const compare = (a, b) => {
    const [x, y] = [valueOf(a.cells[column]), valueOf(b.cells[column])];
    if (x === "" || y === "") return (x === "") - (y === "");
    const difference = typeof x === "number" && typeof y === "number"
      ? x - y : String(x).localeCompare(String(y), "en", { numeric: true });
    return order === "ascending" ? difference : -difference;
  };
  body.append(...[...body.rows].sort(compare));
};
for (const head of document.querySelectorAll(".sorted th:not(.plain)")) {
  const button = document.createElement("button");
  button.type = "button";
  button.append(...head.childNodes);
  button.addEventListener("click", () => sortBy(head));
  head.append(button);
  head.setAttribute("aria-sort", "none");
}
// A table that is wider than its place is scrolled by the keyboard as well.
for (const region of document.querySelectorAll(".scroll")) {
  if (region.scrollWidth > region.clientWidth) region.tabIndex = 0;
}
// The filter hides sets, in the list and below it; without a script all are shown and there is none.
const form = document.querySelector(".filter");
if (form) {
  const rows = [...document.querySelectorAll("#summary tbody tr")];
  const filter = () => {
    const words = form.elements.filter.value.toLowerCase().split(/\s+/).filter(Boolean);
    const hidden = [...form.querySelectorAll('[aria-pressed="false"]')].map((button) => button.value);
    let shown = 0;
    for (const row of rows) {
      const text = row.textContent.toLowerCase();
      const show = !hidden.includes(row.dataset.ruling) && words.every((word) => text.includes(word));
      row.hidden = !show;
      document.getElementById(row.dataset.set).hidden = !show;
      shown += show;
    }
    form.querySelector("output").textContent = `${shown} of ${rows.length} sets`;
  };
  form.addEventListener("input", filter);
  form.addEventListener("submit", (event) => event.preventDefault());
  for (const button of form.querySelectorAll("button")) {
    button.addEventListener("click", () => {
      button.setAttribute("aria-pressed", button.getAttribute("aria-pressed") !== "true");
      filter();
    });
  }
  form.hidden = rows.length < 2;
  document.querySelector(".tally").classList.toggle("printed", !form.hidden);
  filter();
}
// What is folded away on the screen belongs on paper.
addEventListener("beforeprint", () => {
  for (const details of document.querySelectorAll("details")) details.open = true;
});
