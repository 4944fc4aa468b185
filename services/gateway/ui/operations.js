// A scale operation: why it is, who sends to whom and how fast, layers filling, pairs.

import { batches, chains } from "/ui/chart.js";
import { el, ms, rate, show, table } from "/ui/dom.js";
import { ofKind } from "/ui/feed.js";

export const WORDS = { out: "adds instances", in: "gives instances back", mutate: "changes roles", none: "nothing to do" };

export function newestFirst(entities) {
  return ofKind(entities, "operation").sort((a, b) => b.triggered_at_s - a.triggered_at_s);
}

/** Gbit/s so far: bytes over the time since the worker accepted the plan. */
const gbps = (load) => (load && load.bytes && load.after_s > 0 ? (load.bytes * 8) / load.after_s / 1e9 : null);

export function announce(entities) {
  const [newest] = newestFirst(entities);
  if (!newest) return "";
  return `${newest.model} ${WORDS[newest.direction] || ""}: ${newest.status}`;
}

export function showOperations(place, entities) {
  const all = newestFirst(entities);
  const running = all.filter((operation) => operation.status === "running");
  const shown = running.length ? running.slice(0, 4) : all.filter((operation) => operation.direction === "out").slice(0, 1);
  show(place, shown.length ? shown.map((operation) => one(operation, entities)) : el("p", {}, "Nothing has been scaled yet: ", el("code", {}, "blitzscale scale MODEL 2")));
}

function stateOf(target, ready) {
  if (target.failure) return `failed: ${target.failure}`;
  if (target.spare_ms !== null) return "spare";
  if (target.serving_ms !== null) return target.was ? `serves, was ${target.was}` : "serves";
  if (target.live_ms !== null) return "computes while it loads";
  return ready ? "loads" : "waits";
}

/** `where`: what ids begin with, for there may be the same operation twice on the page. */
export function one(operation, entities, where = "op") {
  const model = entities.get(`model/${operation.model}`);
  const layers = model ? model.layers : Math.max(1, ...operation.targets.map((target) => target.layer_ready_ms.length));
  const mine = (kind) => ofKind(entities, kind).filter((thing) => thing.plan === operation.plan_id);
  const loads = new Map(mine("load").map((load) => [load.worker, load]));
  const running = operation.status === "running";
  const name = where === "op" ? operation.plan_id : `${operation.plan_id}, at that moment`;
  const targets = operation.targets.map((target) => {
    const load = running && where === "op" ? loads.get(target.worker_id) : null;
    const ready = target.serving_ms !== null ? layers : Math.max(target.layer_ready_ms.length, load ? load.layers : 0);
    return { id: target.worker_id, ready, is: stateOf(target, ready), gbps: gbps(load) ?? (target.gbps || null), target };
  });
  const first = operation.live.map((pair) => pair.first_cooperative_token_ms).filter((value) => value !== null);
  const isOut = operation.direction === "out";
  return el(
    "article",
    { id: `${where}-${operation.plan_id}` },
    el("h3", {}, `${operation.model} ${WORDS[operation.direction] || operation.direction}: ${operation.status}`),
    el("p", { class: "why" }, `because ${operation.reason}`),
    operation.left_out.map((text) => el("p", { class: "lack" }, `left out: ${text}`)),
    first.length ? el("p", { class: "first" }, `first token computed by both members of a pair after ${ms(Math.min(...first))}`) : null,
    isOut && targets.length ? chains(operation, targets, layers, name) : null,
    targets.length ? table(`Targets of ${name}`, ["worker", "state", "layers", "rate", "done after"], targets.map((t) => [t.id, t.is, isOut ? `${t.ready} of ${layers}` : "–", rate(t.gbps), ms(t.target.serving_ms ?? t.target.spare_ms)])) : null,
    operation.live.length ? pairs(operation, new Map(mine("pair").map((pair) => [pair.pair, pair])), name) : null,
    operation.explain.length ? el("details", { id: `${where}-explain-${operation.plan_id}` }, el("summary", {}, "why so"), el("ul", {}, operation.explain.map((line) => el("li", {}, line)))) : null,
  );
}

function pairs(operation, seen, name) {
  const rows = operation.live.map((pair) => {
    const known = seen.get(pair.pair_id);
    return [pair.source, pair.target, pair.outcome, ms(pair.started_ms), ms(pair.first_cooperative_token_ms), known ? known.batches : pair.batches.length || "–"];
  });
  return [
    table(`Pairs of ${name}`, ["overloaded", "new", "outcome", "began", "first shared token", "batches"], rows),
    operation.live.slice(0, 4).map((pair) => (seen.has(pair.pair_id) ? batches(seen.get(pair.pair_id), name) : null)),
  ];
}
