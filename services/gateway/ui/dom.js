// Elements from names, attributes and children. Strings become text, never markup.

const SVG = "http://www.w3.org/2000/svg";

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === false || value === undefined || value === null) continue;
    element.setAttribute(name, value === true ? "" : String(value));
  }
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined || child === false) continue;
    element.append(child instanceof Node ? child : document.createTextNode(String(child)));
  }
  return element;
}

export const el = (name, attributes = {}, ...children) => fill(document.createElement(name), attributes, children);
export const svg = (name, attributes = {}, ...children) =>
  fill(document.createElementNS(SVG, name), attributes, children);

/** Sentences need room, and figures stay on a line. */
const kind = (cell) => (typeof cell !== "string" ? false : cell.length > 40 ? "words" : "short");

/** A table with a caption; rows are lists of cells, the first of which names the row. */
export function table(caption, columns, rows) {
  return el(
    "div",
    { class: "scrolls", tabindex: 0, role: "region", "aria-label": caption },
    el(
      "table",
      {},
      el("caption", {}, caption),
      el("thead", {}, el("tr", {}, columns.map((column) => el("th", { scope: "col" }, column)))),
      el(
        "tbody",
        {},
        rows.map((cells) =>
          el("tr", {}, cells.map((cell, index) => (index ? el("td", { class: kind(cell) }, cell) : el("th", { scope: "row" }, cell)))),
        ),
      ),
    ),
  );
}

/** Make an element show this. Only what differs is touched: focus, scrolling, selection and what is opened stay. */
export function show(place, ...children) {
  alike(place, el("div", {}, ...children));
}

/** Where tables and pictures go on beyond an edge, that edge says so. */
export function markEdges() {
  const found = [...document.querySelectorAll(".scrolls")].map((box) => {
    const rest = box.scrollWidth - box.clientWidth - box.scrollLeft;
    return [box, `${box.scrollLeft > 1 ? "left " : ""}${rest > 1 ? "right" : ""}`.trim()];
  });
  for (const [box, more] of found) if ((box.dataset.more || "") !== more) box.dataset.more = more;
}

/** What is not said by the state: these attributes stay. */
const KEPT = ["open", "data-more"];

function alike(now, next) {
  const fresh = [...next.childNodes];
  while (now.childNodes.length > fresh.length) now.lastChild.remove();
  fresh.forEach((child, index) => {
    const old = now.childNodes[index];
    if (!old) now.append(child);
    else if (old.nodeName !== child.nodeName || old.id !== child.id) old.replaceWith(child);
    else if (old.nodeType === Node.TEXT_NODE) {
      if (old.data !== child.data) old.data = child.data;
    } else {
      for (const { name } of [...old.attributes]) if (!KEPT.includes(name) && !child.hasAttribute(name)) old.removeAttribute(name);
      for (const { name, value } of child.attributes) if (old.getAttribute(name) !== value) old.setAttribute(name, value);
      alike(old, child);
    }
  });
}

/** A figure and its unit stay on a line. */
export function bytes(number) {
  if (number >= 1e9) return `${(number / 1e9).toFixed(2)}\u00a0GB`;
  return `${(number / 1e6).toFixed(1)}\u00a0MB`;
}

export const rate = (value) => (value === null || value === undefined ? "–" : value >= 0.1 ? `${value.toFixed(2)} Gbit/s` : `${(value * 1000).toFixed(1)} Mbit/s`);

/** Time of day, of Unix seconds; nothing where they are none. */
export function clock(seconds) {
  const moment = new Date(seconds * 1000);
  return Number.isNaN(moment.getTime()) ? "–" : moment.toISOString().slice(11, 19);
}

export const ms = (value) => (value === null || value === undefined ? "–" : `${value.toFixed(0)} ms`);
