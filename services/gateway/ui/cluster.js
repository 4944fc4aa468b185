// Models with their instances, and workers with what their GPU and host memory holds.

import { ofKind } from "/ui/feed.js";
import { bytes, el, show, table } from "/ui/dom.js";

const STATES = ["serving", "live", "loading", "draining", "failed", "spare", "stopping"];

const state = (name) => el("span", { class: `state ${STATES.includes(name) ? name : ""}` }, name);

const time = (value) => (value >= 1000 ? `${(value / 1000).toFixed(1)} s` : `${value.toFixed(value < 10 ? 1 : 0)} ms`);
const times = (median, late) => (median === undefined ? "–" : `${time(median)} / ${time(late)}`);

export function showModels(place, entities) {
  const models = ofKind(entities, "model");
  const [cluster] = ofKind(entities, "cluster");
  if (!models.length && cluster && cluster.silent.includes("pool")) return show(place, el("p", { class: "lack" }, "The pool does not answer: what is registered is not known."));
  if (!models.length) return show(place, el("p", {}, "No model is registered: ", el("code", {}, "blitzscale models add DIR")));
  const rows = models.map((model) => {
    const states = Object.entries(model.states).map(([name, number]) => {
      const [role, is] = name.split(" ");
      return el("span", { class: "chip" }, `${number} ${role === "colocated" ? "" : `${role} `}`, state(is));
    });
    return [
      model.name,
      states.length ? states : model.min ? "none" : "asleep: the next request wakes it",
      `${model.min}–${model.max >= 1000000 ? "∞" : model.max}`,
      model.waiting,
      model.running,
      times(model.ttft_p50_ms, model.ttft_p99_ms),
      times(model.tbt_p50_ms, model.tbt_p99_ms),
      model.tokens_per_s ? model.tokens_per_s.toFixed(0) : "–",
      bytes(model.bytes),
    ];
  });
  const lacks = ofKind(entities, "unplanned").map((lack) =>
    el("p", { class: "lack" }, `${lack.model}: ${lack.wanted} ${lack.role === "colocated" ? "" : `${lack.role} `}instances wanted, and not possible now: ${lack.why}`),
  );
  show(place, table("Models: instances by state", ["model", "instances", "limits", "waiting", "running", "TTFT p50 / p99", "TBT p50 / p99", "tokens/s", "weights"], rows), lacks);
}

export function showWorkers(place, entities) {
  const models = new Map(ofKind(entities, "model").map((model) => [model.name, model]));
  const names = new Map(ofKind(entities, "model").map((model) => [model.hash, model.name]));
  const [cluster] = ofKind(entities, "cluster");
  const cards = ofKind(entities, "worker").map((worker) => {
    const model = models.get(worker.model);
    const layers = model ? model.layers : 0;
    return el(
      "li",
      { class: "worker" },
      el("h3", {}, worker.id),
      el("p", {}, state(worker.state), worker.cordoned ? " drained by hand" : ""),
      worker.model
        ? el("p", {}, `${worker.model}${worker.role === "colocated" ? "" : `, ${worker.role}`}: `, `${worker.layers} of ${layers} layers`)
        : el("p", {}, "no instance"),
      worker.model ? el("progress", { max: layers || 1, value: worker.layers, "aria-label": `layers of ${worker.model} on ${worker.id}` }) : null,
      worker.running === undefined
        ? null
        : el("p", {}, `${worker.running} running, ${worker.queued} waiting, KV ${worker.kv_total ? Math.round((100 * worker.kv_used) / worker.kv_total) : 0} %`),
      worker.copies.length
        ? el("p", {}, "host copies: ", worker.copies.map((copy) => `${names.get(copy.hash) || copy.hash} (${copy.state}, ${bytes(copy.bytes)})`).join(", "))
        : null,
    );
  });
  const more = cluster && cluster.summarised
    ? el("p", {}, `${cluster.workers} workers: `, Object.entries(cluster.states).map(([name, number]) => `${number} ${name}`).join(", "), ". Those that take part in an operation:")
    : null;
  const moves = ofKind(entities, "move").map((move) => [move.model, move.from, move.to, move.requests]);
  show(
    place,
    more,
    el("ul", { class: "workers" }, cards),
    moves.length ? table("Requests that moved in the last minute of looking, their streams unbroken", ["model", "from", "to", "requests"], moves) : null,
  );
}

export function showCost(place, entities) {
  const uses = ofKind(entities, "gpu_time").map((use) => ({ ...use, total: Object.values(use.seconds).reduce((sum, value) => sum + value, 0) }));
  const share = (part, whole = 1) => `${Math.round((100 * part) / (whole || 1))} %`;
  const rows = uses
    .sort((a, b) => b.total - a.total)
    .map((use) => [
      use.model || "(no model)",
      `${(use.total / 3600).toFixed(3)} h`,
      share(use.share),
      use.cost === null ? "–" : use.cost.toFixed(2),
      Object.entries(use.seconds).filter(([, value]) => value).sort((a, b) => b[1] - a[1]).map(([name, value]) => `${name} ${share(value, use.total)}`).join(", "),
    ]);
  show(place, rows.length ? table("Of models that are registered now, since the pool leads", ["model", "GPU hours", "share", "cost", "of it"], rows) : el("p", {}, "nothing is known yet"));
}
