// Operations of the past: a table of them, and the one that was chosen, moment by moment.

import { bytes, clock, el, ms, show, table } from "/ui/dom.js";
import { newestFirst, one, WORDS } from "/ui/operations.js";

export class Past {
  constructor(place, redraw) {
    this.place = place;
    this.chosen = "";
    this.atMs = null;
    place.addEventListener("click", (event) => {
      const button = event.target.closest("button[data-plan]");
      if (!button) return;
      this.chosen = this.chosen === button.dataset.plan ? "" : button.dataset.plan;
      this.atMs = null;
      redraw();
    });
    place.addEventListener("input", (event) => {
      if (event.target.type !== "range") return;
      this.atMs = Number(event.target.value);
      redraw();
    });
  }

  draw(entities) {
    const all = newestFirst(entities);
    const rows = all.map((operation) => [
      el("button", { type: "button", "data-plan": operation.plan_id, "aria-pressed": String(operation.plan_id === this.chosen), "aria-label": `show ${operation.plan_id}` }, clock(operation.triggered_at_s)),
      operation.model,
      WORDS[operation.direction] || operation.direction,
      operation.advice ? "advised" : operation.status,
      ms(operation.trigger_to_first_byte_ms),
      ms(operation.trigger_to_serving_ms ?? operation.trigger_to_spare_ms),
      operation.bytes ? bytes(operation.bytes) : "–",
      operation.reason,
    ]);
    const chosen = all.find((operation) => operation.plan_id === this.chosen);
    show(
      this.place,
      rows.length ? table("Operations, newest first (UTC): press a time to look at it", ["time", "model", "what", "status", "first byte", "done", "bytes", "why"], rows) : el("p", {}, "none"),
      chosen ? this.moment(chosen, entities) : null,
    );
  }

  moment(operation, entities) {
    const endMs = Math.max(1, Math.ceil(endOf(operation)));
    const atMs = this.atMs === null ? endMs : Math.min(this.atMs, endMs);
    return el(
      "div",
      { id: `past-${operation.plan_id}` },
      el("label", { for: "moment" }, `${operation.plan_id}, ${ms(atMs)} after the trigger, of ${ms(endMs)}`),
      el("input", { id: "moment", type: "range", min: 0, max: endMs, step: "any", value: endMs, "aria-valuetext": `${Math.round(atMs)} milliseconds` }),
      one(asOf(operation, atMs, endMs), entities, "past"),
    );
  }
}

/** When the last target was done. Pairs may work off their queues for much longer, in which nothing more is loaded. */
function endOf(operation) {
  const times = operation.targets.flatMap((target) => [target.serving_ms, target.spare_ms, target.loaded_ms, ...target.layer_ready_ms]);
  return Math.max(0, ...times.filter((value) => value !== null));
}

/** The record as it was so many milliseconds after the trigger. */
function asOf(operation, atMs, endMs) {
  if (atMs >= endMs) return operation;
  const by = (value) => (value !== null && value <= atMs ? value : null);
  return {
    ...operation,
    status: "running",
    targets: operation.targets.map((target) => ({
      ...target,
      failure: "",
      layer_ready_ms: target.layer_ready_ms.filter((value) => value <= atMs),
      live_ms: by(target.live_ms),
      loaded_ms: by(target.loaded_ms),
      serving_ms: by(target.serving_ms),
      spare_ms: by(target.spare_ms),
    })),
    live: operation.live
      .filter((pair) => by(pair.started_ms) !== null)
      .map((pair) => ({ ...pair, outcome: by(pair.ended_ms) === null ? "running" : pair.outcome, first_cooperative_token_ms: by(pair.first_cooperative_token_ms) })),
  };
}
