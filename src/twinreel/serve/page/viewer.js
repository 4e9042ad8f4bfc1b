// The selected video in whatever state it is: waiting, forming, done or failed.

import { get, post, Refused, remove } from "./api.js";
import { again, edit, extend } from "./again.js";
import { announce, byId, bytes, count, doing, duration, h, isActive, left, plain, STATUSES, TASKS } from "./dom.js";
import { forget, job as known, listen, one, select } from "./jobs.js";

const FILES = { video: "Video", audio: "Sound", report: "Report", frames: "Frames", latents: "Latents" };
const calm = matchMedia("(prefers-reduced-motion: reduce)");

let shown = null; // id
let drawn = ""; // what the present drawing depends on
let model = null;

/** Get ready; the address `#v/ID` selects a video. */
export function startViewer() {
  listen((job) => job?.id === shown && draw(job));
  addEventListener("hashchange", fromAddress);
  fromAddress();
}

/** What the server says of its weights: whether there are previews. */
export function setViewerModel(given) {
  model = given;
}

/** Show a video; `reveal` brings it into view. */
export async function open(id, reveal = true) {
  history.replaceState(null, "", `#v/${id}`);
  shown = id;
  drawn = "";
  select(id);
  document.dispatchEvent(new CustomEvent("selected", { detail: id }));
  // variants and the newest state are only in the answer to this one question
  const found = (await attempt(() => one(id))) ?? known(id);
  if (shown !== id) return;
  if (!found) return close();
  draw(found);
  if (reveal) byId("viewer").scrollIntoView({ block: "start", behavior: calm.matches ? "auto" : "smooth" });
}

/** The id of the video that is shown. */
export const selected = () => shown;

function close() {
  shown = null;
  drawn = "";
  select(null);
  history.replaceState(null, "", location.pathname);
  byId("viewer").hidden = true;
  byId("viewer").replaceChildren();
  document.dispatchEvent(new CustomEvent("selected", { detail: null }));
}

function fromAddress() {
  const id = /^#v\/([\w-]+)$/.exec(location.hash)?.[1];
  if (id && id !== shown) open(id);
}

function draw(job) {
  const place = byId("viewer");
  const version = [job.id, job.status, job.cancelling, job.variants.length].join();
  if (version !== drawn) {
    drawn = version;
    const focused = place.contains(document.activeElement);
    place.hidden = false;
    place.replaceChildren(...[head, screen, line, note, buttons, details].map((part) => part(job)).filter(Boolean));
    if (focused) place.focus({ preventScroll: true });
  }
  update(job);
}

/** The first words of a prompt: of its first section, without that one's name. */
export function title(job) {
  const text = job.prompt.replace(/^\w+:\s*/, "").split(/\n\s*[a-z]\w*_\w+:/)[0].trim() || job.prompt.trim();
  return text.length > 90 ? `${text.slice(0, 88).trimEnd()}…` : text;
}

function head(job) {
  const shut = h("button", { type: "button", class: "remove", "aria-label": "Close", onclick: close }, "×");
  const others = job.variants.length > 1 ? h("p", { class: "chips", role: "group", "aria-label": "Variants" }, job.variants.map((id, i) =>
    h("button", { type: "button", class: "chip", "aria-pressed": String(id === job.id), onclick: () => open(id, false) }, `Variant ${i + 1}`))) : null;
  return h("div", {}, h("div", { class: "row" }, h("h2", { id: "viewer-title" }, title(job)), shut), others);
}

function screen(job) {
  const [width, height] = job.size.split("x").map(Number);
  const made = h("div", { class: "screen" });
  made.style.aspectRatio = `${width} / ${height}`;
  made.style.maxWidth = `calc(68vh * ${width / height})`;
  if (job.status === "completed") {
    const player = h("video", { controls: true, playsinline: true, loop: true, preload: "metadata", src: `${job.links.content}#t=0.001` });
    player.setAttribute("aria-label", `Video: ${title(job)}`);
    made.append(player);
  } else if (isActive(job)) {
    made.append(h("div", { class: "forming", "aria-hidden": "true" }, h("i"), h("i")), h("p", { class: "why" }));
  } else made.append(h("p", { class: "why" }, STATUSES[job.status]));
  return made;
}

function line(job) {
  if (!isActive(job)) return null;
  const bar = h("progress", { max: 100, value: 0, "aria-label": "Progress of this video" });
  return h("div", { class: "live" }, bar, h("div", { class: "row" }, h("span", { class: "doing" }), h("span", { class: "left dim" })));
}

function update(job) {
  const place = byId("viewer");
  if (!isActive(job)) return;
  const bar = place.querySelector("progress");
  bar.value = job.progress;
  bar.classList.toggle("idle", job.status === "queued");
  place.querySelector(".doing").textContent = doing(job);
  place.querySelector(".left").textContent = left(job);
  place.querySelector(".screen .why").textContent = why(job);
  if (job.preview) preview(place.querySelector(".screen"), job.preview);
}

function why(job) {
  if (job.preview) return "";
  if (job.status === "queued") return "It starts when those before it are done.";
  if (model && !model.preview) return `No preview: ${model.preview_note || "these weights have none"}.`;
  return "The first preview comes after a step.";
}

// The next picture replaces the last once it is there. With reduced motion only its first frame is shown.
function preview(place, address) {
  if (place.dataset.preview === address) return;
  place.dataset.preview = address;
  const picture = new Image();
  picture.alt = "Preview of the forming video";
  picture.className = "preview";
  picture.onload = () => {
    if (!place.isConnected || place.querySelector("video")) return;
    place.querySelectorAll(".preview").forEach((old) => old.remove());
    place.querySelector(".forming")?.remove();
    place.append(calm.matches ? still(picture) : picture);
  };
  picture.src = address;
}

function still(picture) {
  const canvas = h("canvas", { class: "preview", role: "img", "aria-label": picture.alt });
  [canvas.width, canvas.height] = [picture.naturalWidth, picture.naturalHeight];
  canvas.getContext("2d").drawImage(picture, 0, 0);
  return canvas;
}

function note(job) {
  const words = job.error && `${job.error.field ? `${job.error.field}: ` : ""}${job.error.message || "It failed without a word."}`;
  const failed = words && h("p", { class: "error" }, named(job, words));
  const warned = job.warnings.length && h("ul", { class: "warnings", "aria-label": "Warnings" }, job.warnings.map((text) => h("li", {}, named(job, text))));
  return failed || warned ? h("div", {}, failed || null, warned || null) : null;
}

// "keyframes[0]: ..." with the name the page uses for that medium.
function named(job, text) {
  return text.replace(/^(keyframes|references)\[(\d+)\](\.\w+)?/, (path, role, i) => {
    const own = job.inputs.filter((item) => item.role === role.slice(0, -1));
    return own[i] ? roleOf(own[i]) : path;
  });
}

const roleOf = (item) => item.label ?? (item.frame_index === 0 ? "First frame" : "Last frame");

function buttons(job) {
  const made = h("div", { class: "row start actions" });
  const button = (text, act, kind = "") => {
    const one = h("button", { type: "button", class: kind }, text);
    one.addEventListener("click", async () => {
      if (one.getAttribute("aria-disabled") === "true") return;
      one.setAttribute("aria-disabled", "true");
      await attempt(act);
      one.setAttribute("aria-disabled", "false");
    });
    return one;
  };
  if (isActive(job)) {
    made.append(job.cancelling ? h("span", { class: "dim" }, "It ends at its next step.") : button("Cancel", () => cancel(job.id), "danger"));
    made.append(button("Edit a copy", () => edit(job), "quiet"));
    return made;
  }
  if (job.status === "completed") {
    made.append(h("a", { class: "button primary", href: `${job.links.content}?download=1`, download: "" }, "Download"));
  }
  made.append(button("Again with another seed", () => again(job)));
  if (job.status === "completed" && model?.tasks.includes("fl2va")) {
    made.append(button("Use last frame as first", () => extend(job)));
  }
  made.append(button("Edit a copy", () => edit(job), "quiet"), removal(job));
  return made;
}

/** Cancel a job; the events tell the rest. */
export async function cancel(id) {
  await post(`/v1/videos/${encodeURIComponent(id)}/cancel`);
  announce("Cancelling");
  await one(id);
}

// Two presses: the first only asks.
function removal(job) {
  const button = h("button", { type: "button", class: "quiet" }, "Remove");
  button.addEventListener("click", async () => {
    if (!button.classList.contains("danger")) {
      button.classList.add("danger");
      button.textContent = "Remove for good";
      return;
    }
    await attempt(async () => {
      await remove(`/v1/videos/${encodeURIComponent(job.id)}`);
      forget(job.id);
      close();
      announce("Removed");
      document.dispatchEvent(new CustomEvent("removed", { detail: job.id }));
    });
  });
  button.addEventListener("blur", () => {
    button.classList.remove("danger");
    button.textContent = "Remove";
  });
  return button;
}

async function attempt(act) {
  try {
    return await act();
  } catch (error) {
    document.dispatchEvent(new CustomEvent("trouble", { detail: error instanceof Refused ? error.message : String(error.message ?? error) }));
    return null;
  }
}

function details(job) {
  const facts = [
    ["Made from", TASKS[job.task] ?? job.task],
    ["Size", `${job.size.replace("x", " × ")}, ${job.seconds} s, ${count(job.frames, "frame")}`],
    ["Seed", String(job.seed)],
    ["Steps", `${job.steps}, ${count(job.calls, "model call")}`],
    ["Step policy", job.policy],
    ["Took", job.status === "completed" ? duration(job.took) : ""],
    ["Kept until", job.expires_at ? new Date(job.expires_at * 1000).toLocaleDateString() : ""],
  ].filter(([, value]) => value);
  return h("div", { class: "details" }, inputs(job), downloads(job),
    h("details", {}, h("summary", {}, "Prompt"), h("p", { class: "prompt" }, job.prompt)),
    h("details", {}, h("summary", {}, "Figures"), h("dl", { class: "facts" }, facts.map(([name, value]) => [h("dt", {}, name), h("dd", {}, value)]))),
    job.files.report ? report(job) : null);
}

function downloads(job) {
  const links = Object.keys(FILES).filter((variant) => variant in job.files).map((variant) =>
    h("a", { href: `${job.links.content}?variant=${variant}&download=1`, download: "" },
      FILES[variant], job.files[variant] ? h("span", { class: "dim" }, ` ${bytes(job.files[variant])}`) : null));
  return links.length ? h("p", { class: "downloads" }, links) : null;
}

function inputs(job) {
  if (!job.inputs.length) return null;
  return h("ul", { class: "inputs", "aria-label": "Made with" }, job.inputs.map((item) =>
    h("li", {}, item.type === "image" ? h("img", { src: item.url, alt: "", loading: "lazy" })
      : h("span", { class: "thumb note", "aria-hidden": "true" }, item.type === "audio" ? "♪" : "▶"),
    h("a", { href: item.url }, roleOf(item)))));
}

function report(job) {
  const text = h("pre", { tabindex: 0, "aria-label": "Report" }, "…");
  const made = h("details", { class: "report" }, h("summary", {}, "Report"), text);
  made.addEventListener("toggle", async () => {
    if (!made.open || text.dataset.there) return;
    const found = await attempt(() => get(`${job.links.content}?variant=report`));
    text.dataset.there = found ? "yes" : "";
    text.textContent = found ? summary(found) + JSON.stringify(found, null, 2) : "The report did not come.";
  });
  return made;
}

// What people look for first, before the whole of it.
function summary(found) {
  const stages = Object.entries(found.stages ?? {}).filter(([, stage]) => stage?.seconds !== undefined);
  const lines = stages.map(([name, stage]) => `${name.padEnd(9)} ${plain(stage.seconds)} s`);
  return lines.length ? `${lines.join("\n")}\n\n` : "";
}
