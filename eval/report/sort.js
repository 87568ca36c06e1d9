
// Makes the columns of tables sortable; without this the tables stand in the order of the recipes.
for (const hint of document.querySelectorAll(".scripted")) hint.hidden = false;
for (const table of document.querySelectorAll("table.sortable")) {
  const body = table.tBodies[0];
  const heads = [...table.tHead.querySelectorAll("th[data-column]")];
  const groups = () => {
    // A row and the reason of its failure below it move together.
    const found = [];
    for (const row of body.rows) row.classList.contains("reason") ? found.at(-1).push(row) : found.push([row]);
    return found;
  };
  const value = (rows, column) => {
    const cell = rows[0].cells[column];
    return column === 0 ? cell.textContent : cell.dataset.order === undefined ? null : Number(cell.dataset.order);
  };
  const compare = (one, other) => {
    if (one === null || other === null) return (one === null) - (other === null);
    return one < other ? -1 : Number(one > other);
  };
  for (const head of heads) {
    const column = Number(head.dataset.column);
    const button = document.createElement("button");
    button.type = "button";
    button.append(...head.childNodes);
    head.append(button);
    button.addEventListener("click", () => {
      const down = head.getAttribute("aria-sort") === "ascending";
      for (const other of heads) other.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      const sorted = groups().sort((a, b) => {
        const [one, other] = [value(a, column), value(b, column)];
        const order = compare(one, other);
        return down && one !== null && other !== null ? -order : order;
      });
      body.append(...sorted.flat());
    });
  }
}
