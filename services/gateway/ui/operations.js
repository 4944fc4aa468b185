// A scale operation as it happens: who sends to whom and how fast, layers filling, pairs; and the operations before it.

import { ofKind } from "/ui/feed.js";
import { bytes, el, ms, show, svg, table } from "/ui/dom.js";

const WORDS = { out: "adds instances", in: "gives instances back", mutate: "changes roles", none: "nothing to do" };

function newestFirst(entities) {
  return ofKind(entities, "operation").sort((a, b) => b.triggered_at_s - a.triggered_at_s);
}

const loadsOf = (entities, plan) => new Map(ofKind(entities, "load").filter((load) => load.plan === plan).map((load) => [load.worker, load]));

/** Gbit/s so far: bytes over the time since the worker accepted the plan. */
function gbps(load) {
  return load && load.bytes && load.after_s > 0 ? (load.bytes * 8) / load.after_s / 1e9 : null;
}

const rate = (value) => (value === null ? "–" : value >= 0.1 ? `${value.toFixed(2)} Gbit/s` : `${(value * 1000).toFixed(1)} Mbit/s`);

export function announce(entities) {
  const [newest] = newestFirst(entities);
  if (!newest) return "";
  return `${newest.model} ${WORDS[newest.direction] || ""}: ${newest.status}`;
}

export function showOperations(place, past, entities) {
  const all = newestFirst(entities);
  const running = all.filter((operation) => operation.status === "running");
  const shown = running.length ? running.slice(0, 4) : all.filter((operation) => operation.direction === "out").slice(0, 1);
  show(place, shown.length ? shown.map((operation) => one(operation, entities)) : el("p", {}, "Nothing has been scaled yet: ", el("code", {}, "blitzscale scale MODEL 2")));
  const rows = all.map((operation) => [
    new Date(operation.triggered_at_s * 1000).toISOString().slice(11, 19),
    operation.model,
    WORDS[operation.direction] || operation.direction,
    operation.advice ? "advised" : operation.status,
    ms(operation.trigger_to_first_byte_ms),
    ms(operation.trigger_to_serving_ms ?? operation.trigger_to_spare_ms),
    operation.bytes ? bytes(operation.bytes) : "–",
    operation.reason,
  ]);
  show(past, rows.length ? table("Operations, newest first (UTC)", ["time", "model", "what", "status", "first byte", "done", "bytes", "why"], rows) : el("p", {}, "none"));
}

function one(operation, entities) {
  const model = entities.get(`model/${operation.model}`);
  const layers = model ? model.layers : Math.max(1, ...operation.targets.map((target) => target.layer_ready_ms.length));
  const loads = loadsOf(entities, operation.plan_id);
  const targets = operation.targets.map((target) => {
    const load = loads.get(target.worker_id);
    const ready = Math.max(target.layer_ready_ms.length, load ? load.layers : 0);
    const is = target.failure ? `failed: ${target.failure}` : target.serving_ms !== null ? "serves" : target.live_ms !== null ? "computes while it loads" : ready ? "loads" : "waits";
    const done = operation.status !== "running" && operation.gbps > 0 ? operation.gbps : null;
    return { id: target.worker_id, ready: target.serving_ms !== null ? layers : ready, is, gbps: gbps(load) ?? done, target };
  });
  const first = operation.live.map((pair) => pair.first_cooperative_token_ms).filter((value) => value !== null);
  return el(
    "article",
    { id: `op-${operation.plan_id}` },
    el("h3", {}, `${operation.model} ${WORDS[operation.direction] || operation.direction}: ${operation.status}`),
    el("p", { class: "why" }, `because ${operation.reason}`),
    first.length ? el("p", { class: "first" }, `first token computed by both members of a pair after ${ms(Math.min(...first))}`) : null,
    operation.direction === "out" && targets.length ? chart(operation, targets, layers) : null,
    targets.length ? table(`Targets of ${operation.plan_id}`, ["worker", "state", "layers", "rate", "serves after"], targets.map((t) => [t.id, t.is, operation.direction === "out" ? `${t.ready} of ${layers}` : "–", rate(t.gbps), ms(t.target.serving_ms ?? t.target.spare_ms)])) : null,
    operation.live.length ? pairs(operation) : null,
    operation.explain.length ? el("details", { id: `explain-${operation.plan_id}` }, el("summary", {}, "why so"), el("ul", {}, operation.explain.map((line) => el("li", {}, line)))) : null,
  );
}

/** Sources on the left; each hop a column to the right; layers fill in each target's bar. */
function chart(operation, targets, layers) {
  const depth = new Map();
  const hops = operation.hops;
  for (const hop of hops) {
    const from = hop.source || "disk";
    if (!depth.has(from)) depth.set(from, 0);
    depth.set(hop.target, Math.max(depth.get(hop.target) ?? 0, depth.get(from) + 1));
  }
  for (const target of targets) if (!depth.has(target.id)) depth.set(target.id, 1);
  const columns = new Map();
  for (const [name, column] of depth) columns.set(column, [...(columns.get(column) || []), name]);
  const width = 190, height = 64, gap = 70;
  const rows = Math.max(...[...columns.values()].map((names) => names.length));
  const numColumns = Math.max(...columns.keys()) + 1;
  const places = new Map();
  for (const [column, names] of columns) names.forEach((name, row) => places.set(name, [column * (width + gap) + 4, row * (height + 18) + 4]));
  const byId = new Map(targets.map((target) => [target.id, target]));
  const arrows = hops.filter((hop) => places.has(hop.source || "disk") && places.has(hop.target)).map((hop) => {
    const [x1, y1] = places.get(hop.source || "disk");
    const [x2, y2] = places.get(hop.target);
    const target = byId.get(hop.target);
    const moving = target && target.ready < layers && operation.status === "running";
    return [
      svg("line", { x1: x1 + width, y1: y1 + height / 2, x2: x2 - 8, y2: y2 + height / 2, class: moving ? "hop moving" : "hop" }),
      svg("path", { d: `M${x2 - 10},${y2 + height / 2 - 5} l10,5 l-10,5 z`, class: "head" }),
    ];
  });
  const boxes = [...places].map(([name, [x, y]]) => {
    const target = byId.get(name);
    const cell = (width - 20) / layers;
    return svg(
      "g",
      {},
      svg("rect", { x, y, width, height, rx: 8, class: target ? "box" : "box source" }),
      svg("text", { x: x + 10, y: y + 20, class: "name" }, name.length > 24 ? `${name.slice(0, 23)}…` : name),
      svg("text", { x: x + 10, y: y + 37, class: "what" }, target ? `${target.ready} of ${layers} layers, ${rate(target.gbps)}` : name === "disk" ? "checkpoint" : hops.find((hop) => hop.source === name)?.source_kind === "host" ? "host copy" : "serves"),
      target ? Array.from({ length: layers }, (_, layer) => svg("rect", { x: x + 10 + layer * cell, y: y + 45, width: Math.max(1, cell - 1), height: 10, class: layer < target.ready ? "layer ready" : "layer" })) : null,
    );
  });
  const label = `${operation.model}: ${targets.map((t) => `${t.id} has ${t.ready} of ${layers} layers`).join("; ")}`;
  const w = numColumns * (width + gap), h = rows * (height + 18) + 4;
  return el("div", { class: "scrolls", tabindex: 0, role: "region", "aria-label": `chains of ${operation.plan_id}` }, svg("svg", { viewBox: `0 0 ${w} ${h}`, width: w, height: h, role: "img", "aria-label": label }, arrows, boxes));
}

function pairs(operation) {
  return table(
    `Pairs of ${operation.plan_id}`,
    ["overloaded", "new", "outcome", "began", "first shared token", "batches"],
    operation.live.map((pair) => [pair.source, pair.target, pair.outcome, ms(pair.started_ms), ms(pair.first_cooperative_token_ms), pair.batches.length || "–"]),
  );
}
