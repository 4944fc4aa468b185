// Pictures of an operation: who sends to whom, layers filling in each target, and the batches of pairs.

import { el, rate, svg } from "/ui/dom.js";

const WIDTH = 204, HEIGHT = 64, GAP = 70, DOWN = 18;
const MAX_CELLS = 3000;

/** Sources on the left; each hop a column to the right; layers fill in each target's bar. */
export function chains(operation, targets, layers, name) {
  const depth = new Map();
  for (const hop of operation.hops) {
    const from = hop.source || "disk";
    if (!depth.has(from)) depth.set(from, 0);
    depth.set(hop.target, Math.max(depth.get(hop.target) ?? 0, depth.get(from) + 1));
  }
  for (const target of targets) if (!depth.has(target.id)) depth.set(target.id, 1);
  const columns = new Map();
  for (const [name, column] of depth) columns.set(column, [...(columns.get(column) || []), name]);
  const rows = Math.max(...[...columns.values()].map((names) => names.length));
  const numColumns = Math.max(...columns.keys()) + 1;
  const places = new Map();
  for (const [column, names] of columns) names.forEach((name, row) => places.set(name, [column * (WIDTH + GAP) + 4, row * (HEIGHT + DOWN) + 4]));
  const byId = new Map(targets.map((target) => [target.id, target]));
  const perLayer = targets.length * layers <= MAX_CELLS;
  const arrows = operation.hops
    .filter((hop) => places.has(hop.source || "disk") && places.has(hop.target))
    .map((hop) => arrow(places.get(hop.source || "disk"), places.get(hop.target), isMoving(operation, byId.get(hop.target), layers)));
  const boxes = [...places].map(([name, place]) => box(name, place, byId.get(name), operation, layers, perLayer));
  const label = `${operation.model}: ${targets.map((t) => `${t.id} has ${t.ready} of ${layers} layers`).join("; ")}`;
  const width = numColumns * (WIDTH + GAP), height = rows * (HEIGHT + DOWN) + 4;
  return scrolls(`chains of ${name}`, svg("svg", { viewBox: `0 0 ${width} ${height}`, width, height, role: "img", "aria-label": label }, arrows, boxes));
}

const isMoving = (operation, target, layers) => Boolean(target) && target.ready < layers && operation.status === "running";

function arrow([x1, y1], [x2, y2], moving) {
  return [
    svg("line", { x1: x1 + WIDTH, y1: y1 + HEIGHT / 2, x2: x2 - 8, y2: y2 + HEIGHT / 2, class: moving ? "hop moving" : "hop" }),
    svg("path", { d: `M${x2 - 10},${y2 + HEIGHT / 2 - 5} l10,5 l-10,5 z`, class: "head" }),
  ];
}

function box(name, [x, y], target, operation, layers, perLayer) {
  const what = target ? `${target.ready} of ${layers} layers, ${rate(target.gbps)}` : name === "disk" ? "checkpoint" : operation.hops.find((hop) => hop.source === name)?.source_kind === "host" ? "host copy" : "serves";
  return svg(
    "g",
    {},
    svg("rect", { x, y, width: WIDTH, height: HEIGHT, rx: 8, class: target ? "box" : "box source" }),
    svg("text", { x: x + 10, y: y + 20, class: "name" }, name.length > 24 ? `${name.slice(0, 23)}…` : name),
    svg("text", { x: x + 10, y: y + 37, class: "what" }, what),
    target ? bar(x + 10, y + 45, target.ready, layers, perLayer) : null,
  );
}

/** A cell for each layer; of many, only how far they are. */
function bar(x, y, ready, layers, perLayer) {
  const width = WIDTH - 20, cell = width / layers;
  if (perLayer) return Array.from({ length: layers }, (_, layer) => svg("rect", { x: x + layer * cell, y, width: Math.max(1, cell - 1), height: 10, class: layer < ready ? "layer ready" : "layer" }));
  return [svg("rect", { x, y, width, height: 10, class: "layer" }), svg("rect", { x, y, width: cell * ready, height: 10, class: "layer ready" })];
}

/** The last batches of a running pair: what the new instance ran of each, and what the overloaded one. */
export function batches(pair, name) {
  if (!pair.recent || !pair.recent.length) return null;
  const cell = 14, high = 70, width = pair.recent.length * cell + 4;
  const bars = pair.recent.map(([tokens, target, source], index) => {
    const x = index * cell + 2, part = (high * target) / Math.max(1, target + source);
    return svg(
      "g",
      {},
      svg("title", {}, `${tokens} tokens: ${target} layers at ${pair.target}, ${source} at ${pair.source}`),
      svg("rect", { x, y: 2, width: cell - 3, height: high - part, class: "at-source" }),
      svg("rect", { x, y: 2 + high - part, width: cell - 3, height: part, class: "at-target" }),
    );
  });
  const split = pair.recent.filter(([, target, source]) => target && source).length;
  const label = `the last ${pair.recent.length} of ${pair.batches} batches of ${pair.source} and ${pair.target}: ${split} computed by both`;
  return el(
    "figure",
    {},
    el("figcaption", {}, el("span", { class: "key at-target" }, `layers run by ${pair.target}, the new one`), " ", el("span", { class: "key at-source" }, `by ${pair.source}`), `; ${label}`),
    scrolls(`batches of ${pair.pair} of ${name}`, svg("svg", { viewBox: `0 0 ${width} ${high + 4}`, width, height: high + 4, role: "img", "aria-label": label }, bars)),
  );
}

const scrolls = (label, child) => el("div", { class: "scrolls", tabindex: 0, role: "region", "aria-label": label }, child);
