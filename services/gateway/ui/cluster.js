// Models with their instances, workers with what their GPU and host memory holds, requests that moved, and GPU time.

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
        : el("p", {}, `${worker.running} running, ${worker.queued} waiting, KV ${worker.kv_total ? Math.round((100 * worker.kv_used) / worker.kv_total) : 0}\u00a0%`),
      worker.copies.length
        ? el("p", {}, "host copies: ", worker.copies.map((copy) => `${names.get(copy.hash) || copy.hash} (${copy.state}, ${bytes(copy.bytes)})`).join(", "))
        : null,
    );
  });
  const more = cluster && cluster.summarised
    ? el("p", {}, `${cluster.workers} workers: `, Object.entries(cluster.states).map(([name, number]) => `${number} ${name}`).join(", "), ". Those that take part in an operation:")
    : null;
  show(place, more, el("ul", { class: "workers" }, cards));
}

export function showMoves(place, entities) {
  const rows = ofKind(entities, "move").map((move) => [move.model, move.requests, move.from, move.to]);
  const caption = "In the last minute, to another worker without a break in the answer; counted while somebody looks";
  show(place, rows.length ? table(caption, ["model", "requests", "from", "to"], rows) : el("p", {}, "none in the last minute"));
}

export function showCost(place, entities) {
  const uses = ofKind(entities, "gpu_time").map((use) => ({ ...use, total: Object.values(use.seconds).reduce((sum, value) => sum + value, 0) }));
  if (!uses.length) return show(place, el("p", {}, "nothing is known yet"));
  const share = (part, whole = 1) => {
    const percent = (100 * part) / (whole || 1);
    return percent > 0 && percent < 0.5 ? "< 1\u00a0%" : `${Math.round(percent)}\u00a0%`;
  };
  const price = (cost) => (cost > 0 && cost < 0.01 ? "< 0.01" : cost.toFixed(2));
  const priced = uses.every((use) => use.cost !== null);
  const rows = uses
    .sort((a, b) => !a.model - !b.model || b.total - a.total)
    .map((use) => [
      use.model || "(no model)",
      `${(use.total / 3600).toFixed(3)} h`,
      priced ? price(use.cost) : [],
      share(use.share),
      Object.entries(use.seconds).filter(([, value]) => value).sort((a, b) => b[1] - a[1]).map(([name, value]) => `${name} ${share(value, use.total)}`).join(", "),
    ].flat());
  const caption = `What the workers' GPUs were for${priced ? ", and its cost at --gpu-hour-cost" : ""}; counted since this pool leads`;
  show(
    place,
    table(caption, ["model", "GPU hours", priced ? "cost" : [], "share", "by state"].flat(), rows),
    priced ? null : el("p", {}, "No cost without a price: ", el("code", {}, "blitzscale up --gpu-hour-cost PRICE")),
  );
}
