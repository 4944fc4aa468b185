// The page: asks for a key where one is wanted, and shows what the feed says. It only reads.

import { Feed, STALE_MS, ofKind } from "/ui/feed.js";
import { showCost, showModels, showMoves, showWorkers } from "/ui/cluster.js";
import { markEdges } from "/ui/dom.js";
import { announce, showOperations } from "/ui/operations.js";
import { Past } from "/ui/past.js";

const KEY = "blitz.admin-key";
const at = (id) => document.getElementById(id);
let connected = false;
let due = false;
let announcedMs = -Infinity;

const feed = new Feed(onState, onConnection, onRefused);
const past = new Past(at("past"), draw);

function onState() {
  at("main").hidden = false;
  at("login").hidden = true;
  // Four times a second at most, however many frames came.
  if (!due) {
    due = true;
    setTimeout(() => {
      due = false;
      draw();
    }, 250);
  }
}

function draw() {
  const entities = feed.entities;
  const [cluster] = ofKind(entities, "cluster");
  showModels(at("models"), entities);
  showOperations(at("operation"), entities);
  past.draw(entities);
  showWorkers(at("workers"), entities);
  showMoves(at("moves"), entities);
  showCost(at("cost"), entities);
  markEdges();
  if (connected) {
    const silent = cluster && cluster.silent.length ? `; silent: ${cluster.silent.join(", ")}` : "";
    const cut = feed.isCut ? "; not all of it fits here" : "";
    at("connection").textContent = `live${silent}${cut}`;
    at("connection").className = silent || cut ? "stale" : "live";
  }
  const text = announce(entities);
  // At most every five seconds: a screen reader would never end.
  if (text && text !== at("announce").textContent && performance.now() - announcedMs > 5000) {
    announcedMs = performance.now();
    at("announce").textContent = text;
  }
}

function onConnection(text, isFine) {
  connected = isFine;
  at("connection").textContent = text;
  at("connection").className = isFine ? "live" : "stale";
}

function onRefused(message) {
  sessionStorage.removeItem(KEY);
  at("main").hidden = true;
  at("login").hidden = false;
  at("refused").textContent = message;
  at("key").focus();
  onConnection("not connected", false);
}

at("login").addEventListener("submit", (event) => {
  event.preventDefault();
  const key = at("key").value.trim();
  at("key").value = "";
  at("refused").textContent = "";
  sessionStorage.setItem(KEY, key);
  feed.start(key);
});

// Scrolling does not bubble.
document.addEventListener("scroll", markEdges, { capture: true, passive: true });
window.addEventListener("resize", markEdges);

setInterval(() => {
  if (connected && performance.now() - feed.lastHeardMs > STALE_MS) {
    onConnection("nothing was heard for a while: what you see may be old", false);
    feed.start(feed.key);
  }
}, 1000);

feed.start(sessionStorage.getItem(KEY) || "");
