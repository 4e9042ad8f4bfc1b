// What is known of the jobs: one list, kept true by asking now and then and by the events of what runs.

import { follow, get, Refused } from "./api.js";
import { isActive } from "./dom.js";

const OFTEN = 3000, SELDOM = 15000; // milliseconds between looks at the queue
const STREAMS = 2; // a browser holds six connections to one host; videos and pictures need some

const known = new Map(); // id -> job
const streams = new Map(); // id -> what ends it
const listeners = new Set();
let selected = null;
let timer = 0;
let asking = null;

/** `told(job, before)` for every job that is new or changed; job is null when the whole queue was looked at. */
export function listen(told) {
  listeners.add(told);
}

/** The job with this id, as far as it is known. */
export const job = (id) => known.get(id);

/** Jobs that run, then those that wait, in their order. */
export function active() {
  const rank = (item) => (item.status === "in_progress" ? -1 : (item.position ?? 1e6));
  return [...known.values()].filter(isActive).sort((a, b) => rank(a) - rank(b) || a.created_at - b.created_at);
}

/** Take in what the server said of a job. */
export function learn(item) {
  const before = known.get(item.id);
  if (before && !isActive(before) && isActive(item)) return; // an older answer that came late
  // only the answer to one job lists its variants
  known.set(item.id, item.variants.length === 0 && before ? { ...item, variants: before.variants } : item);
  if (before && JSON.stringify(before) === JSON.stringify(known.get(item.id))) return;
  for (const told of listeners) told(known.get(item.id), before);
  if (before && isActive(before) && !isActive(item)) refresh(); // the next one has begun
  connect();
}

/** A job is gone. */
export function forget(id) {
  known.delete(id);
  for (const told of listeners) told(null);
}

/** Follow this job above others. */
export function select(id) {
  selected = id;
  connect();
}

/** Ask for the queue now. */
export async function refresh() {
  asking ??= look().finally(() => (asking = null));
  await asking;
}

async function look() {
  clearTimeout(timer);
  try {
    const pages = await Promise.all(
      ["in_progress", "queued"].map((status) => get(`/v1/videos?limit=100&order=asc&status=${status}`)),
    );
    const found = pages.flatMap((page) => page.data);
    const ids = new Set(found.map((item) => item.id));
    const missing = [...known.values()].filter((item) => isActive(item) && !ids.has(item.id));
    found.forEach(learn);
    await Promise.all(missing.map((item) => one(item.id)));
    connect(); // also to those whose stream was lost
    for (const told of listeners) told(null);
    document.dispatchEvent(new CustomEvent("reached"));
  } catch (error) {
    if (!(error instanceof Refused)) throw error;
    document.dispatchEvent(new CustomEvent("unreached", { detail: error }));
  } finally {
    clearTimeout(timer);
    timer = setTimeout(refresh, active().length && !document.hidden ? OFTEN : SELDOM);
  }
}

/** Ask for one job; null when there is none of that id. */
export async function one(id) {
  try {
    const item = await get(`/v1/videos/${encodeURIComponent(id)}`);
    learn(item);
    return known.get(id);
  } catch (error) {
    if (!(error instanceof Refused) || error.status !== 404) throw error;
    if (known.has(id)) forget(id);
    return null;
  }
}

function connect() {
  const wanted = active()
    .sort((a, b) => (b.id === selected) - (a.id === selected))
    .slice(0, STREAMS)
    .map((item) => item.id);
  for (const [id, end] of streams) {
    if (!wanted.includes(id)) {
      end();
      streams.delete(id);
    }
  }
  for (const id of wanted) if (!streams.has(id)) streams.set(id, follow(id, learn, () => streams.delete(id)));
}

document.addEventListener("visibilitychange", () => document.hidden || refresh());
