// The queue of what runs and waits, and the history of what has ended.

import { get } from "./api.js";
import { ago, byId, count, doing, h, isActive, left, STATUSES, TASKS } from "./dom.js";
import { active, learn, listen } from "./jobs.js";
import { cancel, open, selected, title } from "./viewer.js";
import { welcome } from "./welcome.js";

const PAGE = 12;
let past = []; // jobs of the history, newest first
let last = null; // id to go on after
let more = false;
let lost = false; // the question for the first page has had no answer
let turn = 0; // of the questions, so that a slow answer to an old one is dropped
let watcher;
let bundled = false;

/** Get ready and ask for the first page; `miniature`: the bundled weights are loaded. */
export function startLists(miniature) {
  bundled = miniature;
  watcher = new IntersectionObserver(arrived, { rootMargin: "300px" });
  listen((job, before) => {
    drawQueue();
    if (job && !isActive(job) && (!before || isActive(before)) && before) ended(job);
  });
  document.addEventListener("selected", mark);
  document.addEventListener("reached", () => lost && ask(true));
  document.addEventListener("removed", (event) => {
    past = past.filter((job) => job.id !== event.detail);
    drawPast();
  });
  byId("filters").addEventListener("submit", (event) => event.preventDefault());
  let pause = 0;
  byId("filters").addEventListener("input", () => {
    clearTimeout(pause);
    pause = setTimeout(() => ask(true), 250);
  });
  byId("older").addEventListener("click", () => ask(false));
  return ask(true);
}

function filters() {
  return { q: byId("words").value.trim(), status: byId("by-status").value, task: byId("by-task").value };
}

async function ask(anew) {
  const mine = ++turn;
  const given = Object.entries(filters()).filter(([, value]) => value);
  const query = new URLSearchParams([["limit", PAGE], ...given]);
  if (!anew && last) query.set("after", last);
  let found;
  try {
    found = await get(`/v1/videos?${query}`);
  } catch (error) {
    if (error.field === "after" && mine === turn) return ask(true); // the card to go on after was removed meanwhile
    if (mine === turn) lost = anew;
    return; // the banner says that the server is not reached
  }
  if (mine !== turn) return;
  lost = false;
  [last, more] = [found.last_id, found.has_more];
  found.data.forEach(learn);
  const fresh = found.data.filter((job) => !isActive(job));
  past = anew ? fresh : [...past, ...fresh.filter((job) => !past.some((old) => old.id === job.id))];
  drawPast();
  if (!past.length && more) await ask(false); // a page of nothing but waiting jobs
}

function ended(job) {
  const { q, status, task } = filters();
  const words = q.toLowerCase().split(/\s+/).filter(Boolean);
  const fits = (!status || status === job.status) && (!task || task === job.task);
  if (!fits || !words.every((word) => job.prompt.toLowerCase().includes(word))) return;
  past = [job, ...past.filter((old) => old.id !== job.id)];
  drawPast();
}

function drawPast() {
  const filtered = Object.values(filters()).some(Boolean);
  byId("history-count").textContent = filtered ? (more ? `${past.length} or more videos` : count(past.length, "video")) : "";
  const place = byId("past");
  const old = new Map([...place.children].map((card) => [card.dataset.id, card]));
  place.replaceChildren(...past.map((job) => old.get(job.id) ?? card(job)));
  byId("past-empty").hidden = past.length > 0;
  byId("past-empty").textContent = filtered ? "Nothing fits these filters." : "What you make is kept here.";
  byId("older").hidden = !more;
  invite();
  mark();
}

function invite() {
  const none = past.length === 0 && active().length === 0 && !Object.values(filters()).some(Boolean);
  welcome(none, bundled);
}

function card(job) {
  const picture = h("span", { class: "still" });
  if (job.status === "completed") {
    picture.dataset.source = `${job.links.content}#t=0.5`;
    watcher.observe(picture);
  } else picture.append(h("span", {}, STATUSES[job.status]));
  const facts = [TASKS[job.task], `${Number(job.seconds)} s`, `seed ${job.seed}`, ago(job.completed_at ?? job.created_at)];
  const link = h("a", { href: `#v/${job.id}`, class: job.status }, picture,
    h("span", { class: "words" }, title(job)), h("span", { class: "dim" }, facts.join(" · ")));
  link.addEventListener("click", (event) => {
    if (event.ctrlKey || event.metaKey || event.shiftKey) return;
    event.preventDefault();
    open(job.id);
  });
  return h("li", { data: { id: job.id } }, link);
}

// A video is only asked for when its card comes near the screen.
function arrived(entries) {
  for (const { target, isIntersecting } of entries) {
    if (!isIntersecting || !target.dataset.source) continue;
    const clip = h("video", { preload: "metadata", playsinline: true, src: target.dataset.source, "aria-hidden": "true", tabindex: -1 });
    clip.muted = true;
    target.append(clip);
    delete target.dataset.source;
    watcher.unobserve(target);
  }
}

function mark() {
  for (const link of document.querySelectorAll("#past a, #waiting .open")) {
    const is = link.closest("[data-id]").dataset.id === selected();
    link.toggleAttribute("aria-current", is);
    if (is) link.setAttribute("aria-current", "true");
  }
}

function drawQueue() {
  const jobs = active();
  invite();
  byId("queue-empty").hidden = jobs.length > 0;
  byId("queue-count").hidden = jobs.length === 0;
  byId("queue-count").textContent = jobs.length;
  const place = byId("waiting");
  const old = new Map([...place.children].map((row) => [row.dataset.id, row]));
  const rows = jobs.map((job) => fill(old.get(job.id) ?? row(job), job));
  // rows that stay where they are keep the focus
  if (rows.length !== place.children.length || rows.some((made, i) => made !== place.children[i])) {
    place.replaceChildren(...rows);
  }
  mark();
  const running = jobs.find((job) => job.status === "in_progress");
  document.title = running ? `${running.progress} % · twinreel` : jobs.length ? "Waiting · twinreel" : "twinreel";
}

function row(job) {
  const name = title(job);
  const stop = h("button", { type: "button", class: "quiet stop" }, "Cancel");
  stop.setAttribute("aria-label", `Cancel: ${name}`);
  stop.addEventListener("click", () => cancel(job.id).catch((error) =>
    document.dispatchEvent(new CustomEvent("trouble", { detail: error.message }))));
  const show = h("button", { type: "button", class: "open", onclick: () => open(job.id) }, name);
  return h("li", { data: { id: job.id } }, show, stop,
    h("progress", { max: 100, value: 0, "aria-label": `Progress of ${name}` }),
    h("span", { class: "doing" }), h("span", { class: "left dim" }));
}

function fill(made, job) {
  const bar = made.querySelector("progress");
  bar.value = job.progress;
  bar.classList.toggle("idle", job.status === "queued");
  made.querySelector(".doing").textContent = doing(job);
  made.querySelector(".left").textContent = left(job) || `seed ${job.seed}`;
  made.querySelector(".stop").disabled = job.cancelling;
  return made;
}
