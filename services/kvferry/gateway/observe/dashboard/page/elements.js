// Elements of HTML and SVG. Text from the gateway only ever becomes text nodes and attribute values.

const SVG = "http://www.w3.org/2000/svg";

/** Create an HTML element. Children are nodes or strings; an attribute with the value null is left out. */
export function html(name, attributes = {}, ...children) {
  return filled(document.createElement(name), attributes, children);
}

/** Create an SVG element. */
export function svg(name, attributes = {}, ...children) {
  return filled(document.createElementNS(SVG, name), attributes, children);
}

function filled(element, attributes, children) {
  for (const [key, value] of Object.entries(attributes)) {
    if (value !== null && value !== undefined) element.setAttribute(key, String(value));
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return element;
}

/**
 * Replace the content of the element with this id. What has the focus keeps it: a link by its href, a scrolled part by
 * its number.
 */
export function show(id, ...children) {
  const place = document.getElementById(id);
  const focused = place.contains(document.activeElement) ? document.activeElement.getAttribute("href") : null;
  const parts = [...place.querySelectorAll(".scroll")];
  const focusedPart = parts.indexOf(document.activeElement);
  const tops = parts.map((part) => part.scrollTop);
  place.replaceChildren(...children.flat());
  place.querySelectorAll(".scroll").forEach((part, number) => {
    part.scrollTop = tops[number] ?? 0;
    if (number === focusedPart) part.focus({ preventScroll: true });
  });
  if (focused) [...place.querySelectorAll("a")].find((link) => link.getAttribute("href") === focused)?.focus();
}

/**
 * Create a table. A column has a label, a function from a row to its content, and optionally `number: true` (aligned to
 * the right), `full: true` (on a separate line on narrow screens) or a kind, by which long content is broken: `id`,
 * `name`, `text`, or `fixed` (not at all).
 * Roles are explicit, because narrow screens show rows as blocks, which removes the implicit roles.
 */
export function table(caption, columns, rows, rowClass = () => null) {
  const head = columns.map((column) =>
    html("th", { scope: "col", role: "columnheader", class: column.number ? "number" : null }, column.label));
  const body = rows.map((row) => html("tr", { role: "row", class: rowClass(row) },
    columns.map((column, number) => cell(column, column.content(row), number === 0))));
  return html("table", { role: "table" },
    html("caption", {}, caption),
    html("thead", { role: "rowgroup" }, html("tr", { role: "row" }, head)),
    html("tbody", { role: "rowgroup" }, body));
}

function cell(column, content, isHead) {
  const parts = [content].flat().filter((part) => part !== "" && part !== null && part !== undefined);
  const classes = [column.number ? "number" : "", isHead ? "head" : "", column.full ? "full" : "", column.kind ?? "",
    parts.length ? "" : "empty-cell"];
  return html("td", { role: "cell", "data-label": column.label, class: classes.filter(Boolean).join(" ") || null }, parts);
}

/** Create a part that scrolls by itself, also with the keyboard. */
export function scrolled(name, ...children) {
  return html("div", { class: "scroll", tabindex: 0, role: "group", "aria-label": name }, ...children);
}

/** Create a paragraph in place of missing data. */
export function empty(text) {
  return html("p", { class: "empty" }, text);
}

/** Create a word with the color of a state: good, warn or bad. */
export function state(kind, text) {
  return html("span", { class: `state ${kind}` }, text);
}
