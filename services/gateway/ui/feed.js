// Reads the feed: server-sent events by fetch, so that the key is in a header. Keeps the newest state, and goes on from
// the last event after a break.

const RETRY_MS = [500, 1000, 2000, 5000];
export const STALE_MS = 12000;

/** The gateway says why it gives nothing now. */
class Refused extends Error {}

export class Feed {
  /** `onState(entities)` after each event; `onConnection(text, isFine)`; `onRefused(message)` when a key is wanted. */
  constructor(onState, onConnection, onRefused) {
    this.entities = new Map();
    this.lastHeardMs = 0;
    this.onState = onState;
    this.onConnection = onConnection;
    this.onRefused = onRefused;
    this.lastId = "";
    this.isCut = false;
    this.failures = 0;
  }

  start(key) {
    this.stop();
    this.key = key;
    this.aborter = new AbortController();
    this.run(this.aborter);
  }

  stop() {
    if (this.aborter) this.aborter.abort();
  }

  async run(aborter) {
    while (!aborter.signal.aborted) {
      try {
        if (!(await this.readOnce(aborter.signal))) return;
        this.onConnection("the feed ended; connecting again …", false);
      } catch (error) {
        if (aborter.signal.aborted) return;
        const why = error instanceof Refused ? error.message : "disconnected";
        this.onConnection(`${why}; what you see is the last that was known`, false);
      }
      const waitMs = RETRY_MS[Math.min(this.failures++, RETRY_MS.length - 1)];
      await new Promise((resolve) => setTimeout(resolve, waitMs));
    }
  }

  /** False: a key is wanted, and it makes no sense to ask again with this one. */
  async readOnce(signal) {
    if (/[^\x21-\x7e]/.test(this.key)) {
      this.onRefused("a key has only ASCII characters, and no blanks");
      return false;
    }
    const headers = { Accept: "text/event-stream" };
    if (this.key) headers.Authorization = `Bearer ${this.key}`;
    if (this.lastId) headers["Last-Event-ID"] = this.lastId;
    const response = await fetch("/admin/events", { headers, signal, cache: "no-store" });
    if (!response.ok) {
      const body = await response.json().catch(() => ({}));
      const why = body.error ? String(body.error.message) : `status ${response.status}`;
      if (response.status !== 401 && response.status !== 403) throw new Refused(why);
      this.entities.clear();
      this.lastId = "";
      this.onRefused(why);
      return false;
    }
    this.failures = 0;
    this.onConnection("live", true);
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    let text = "";
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return true;
      this.lastHeardMs = performance.now();
      text += value;
      const events = text.split("\n\n");
      text = events.pop();
      for (const event of events) this.take(event);
    }
  }

  take(text) {
    let kind = "";
    let data = "";
    for (const line of text.split("\n")) {
      if (line.startsWith("event: ")) kind = line.slice(7);
      else if (line.startsWith("id: ")) this.lastId = line.slice(4);
      else if (line.startsWith("data: ")) data = line.slice(6);
    }
    if (!data) return;
    const found = JSON.parse(data);
    this.isCut = Boolean(found.is_cut);
    if (kind === "snapshot") {
      this.entities = new Map(Object.entries(found.entities));
    } else {
      for (const [name, value] of Object.entries(found.changed)) this.entities.set(name, value);
      for (const name of found.gone) this.entities.delete(name);
    }
    this.onState(this.entities);
  }
}

/** All entities of a kind, in the order of their names. */
export function ofKind(entities, kind) {
  const prefix = `${kind}/`;
  return [...entities.keys()].filter((name) => name.startsWith(prefix)).sort().map((name) => entities.get(name));
}
