// The pictures, clips and sounds of the next request: two frames or a list of references, never both.

import { announce, byId, bytes, count, duration, h, plain } from "./dom.js";
import { hasSound, kindOf, secondsOf } from "./files.js";
import { sortable } from "./sort.js";

const NOUNS = { image: "picture", video: "clip", audio: "sound" };
const FRAMES = { first: "First frame", last: "Last frame" };

let first = null, last = null, references = [];
let number = 0;
let tasks = ["t2va", "fl2va", "ref2va"];
let changed = () => {};
let insertLabel = () => {};

/** Get ready; `onchange()` after every change, `insert(label)` when a label is to go into the prompt. */
export function startMedia(onchange, insert) {
  [changed, insertLabel] = [onchange, insert];
  for (const input of document.querySelectorAll(".slot input[type=file]")) {
    input.addEventListener("change", () => {
      add([...input.files], input.closest(".slot").dataset.slot);
      input.value = "";
    });
  }
  document.addEventListener("dragover", (event) => {
    if (!event.dataTransfer?.types.includes("Files")) return;
    event.preventDefault();
    mark(event.target.closest?.(".slot"));
  });
  document.addEventListener("dragleave", (event) => event.relatedTarget ?? mark(null));
  document.addEventListener("drop", (event) => {
    if (!event.dataTransfer?.files.length) return;
    event.preventDefault();
    mark(null);
    add([...event.dataTransfer.files], event.target.closest?.(".slot")?.dataset.slot);
  });
  document.addEventListener("paste", (event) => event.clipboardData?.files.length && add([...event.clipboardData.files]));
  byId("to-references").addEventListener("click", toReferences);
  byId("to-frames").addEventListener("click", toFrames);
  sortable(byId("references"), move);
  draw();
}

/** What the loaded weights can do. */
export function setTasks(list) {
  if (list.join() === tasks.join()) return; // drawing takes the cursor out of the fields
  tasks = list;
  draw();
}

/** Every item in the order in which it is sent. */
export const items = () => [first, last, ...references].filter(Boolean);

/** The task that the present media make. */
export const task = () => (references.length ? "ref2va" : first || last ? "fl2va" : "t2va");

/** How many references bring sound; null when one may or may not. */
export function sounding() {
  const heard = references.map((item) => (item.kind === "audio" || (item.kind === "video" && item.sound)));
  if (references.some((item) => item.kind === "video" && item.sound === null)) return null;
  return heard.filter(Boolean).length;
}

/** The labels of each reference, as the prompt writes them. */
export function labels() {
  const counts = { Picture: 0, Video: 0, Audio: 0 };
  return references.map((item) => {
    const made = [];
    if (item.kind === "audio" || (item.kind === "video" && item.sound)) made.push(`Audio ${++counts.Audio}`);
    if (item.kind === "image") made.push(`Picture ${++counts.Picture}`);
    if (item.kind === "video") made.push(`Video ${++counts.Video}`);
    return made;
  });
}

/** Take files in. Without a slot: pictures become frames while there is room and nothing else, the rest references. */
export function add(files, slot = undefined) {
  complain("");
  const taken = [];
  for (const file of files) {
    const kind = kindOf(file);
    if (kind === null) complain(`${file.name} is no picture, clip or sound.`);
    else taken.push({ id: ++number, file, kind, url: URL.createObjectURL(file), sound: kind === "audio", strict: false });
  }
  if (!taken.length) return;
  const frames = items().length - references.length;
  const fits = taken.every((item) => item.kind === "image") && !references.length && frames + taken.length <= 2;
  slot ??= fits && tasks.includes("fl2va") ? (first ? "last" : "first") : "references";
  if (slot === "references") addReferences(taken);
  else addFrames(taken, slot);
  draw();
  changed();
}

function addReferences(taken) {
  if (!tasks.includes("ref2va")) return complain("The loaded weights take no references, only a first or last frame.");
  if (first || last) toReferences();
  references.push(...taken);
  for (const item of taken) look(item);
  announce(`${count(taken.length, "reference")} added`);
}

function addFrames(taken, slot) {
  const pictures = taken.filter((item) => item.kind === "image");
  if (pictures.length < taken.length) return complain("A frame is a picture. Clips and sounds go under References.");
  if (references.length) return complain("Frames and references do not go together. Remove the references first.");
  if (slot === "first") first = pictures[0];
  if (slot === "last") last = pictures[0];
  if (slot === "first" && pictures[1]) last = pictures[1];
  announce(`${FRAMES[slot]} set`);
}

/** Put files where an earlier request had them: `placed` are {file, condition}. */
export function restore(placed) {
  clear();
  for (const { file, condition } of placed) {
    const kind = { image: "image", audio: "audio" }[condition.type] ?? "video";
    const item = { id: ++number, file, kind, url: URL.createObjectURL(file), sound: kind === "audio" };
    item.strict = condition.type === "video_audio";
    item.start = condition.start_time_seconds;
    item.end = condition.end_time_seconds;
    item.fit = condition.fit;
    if (condition.role === "reference") references.push(item);
    else if (condition.frame_index === 0) first = item;
    else last = item;
    look(item);
  }
  draw();
  changed();
}

/** Take everything out. */
export function clear() {
  for (const item of items()) URL.revokeObjectURL(item.url);
  [first, last, references] = [null, null, []];
  complain("");
  draw();
  changed();
}

/** The conditions of the request, naming the parts media-0, media-1, ... */
export function conditions() {
  return items().map((item, i) => {
    const uri = `upload:media-${i}`;
    if (item === first || item === last) {
      const fit = item.fit && item.fit !== "auto" ? { fit: item.fit } : {};
      return { type: "image", uri, role: "keyframe", frame_index: item === first ? 0 : -1, ...fit };
    }
    const made = { type: item.kind === "video" && item.strict ? "video_audio" : item.kind, uri, role: "reference" };
    if (Number.isFinite(item.start)) made.start_time_seconds = item.start;
    if (Number.isFinite(item.end)) made.end_time_seconds = item.end;
    return made;
  });
}

/** Show an error at item `i` (as sent), or at the whole of the media. */
export function complainAt(i, text) {
  const item = items()[i];
  const place = item && document.querySelector(`[data-item="${item.id}"] .error`);
  if (!place) return complain(text);
  place.textContent = text;
  place.closest("[data-item]").classList.add("invalid");
  place.closest("[data-item]").querySelector("button").focus();
}

export function complain(text) {
  byId("media-error").textContent = text;
  if (!text) document.querySelectorAll("[data-item]").forEach((place) => {
    place.classList.remove("invalid");
    place.querySelector(".error").textContent = "";
  });
}

function toReferences() {
  references = [first, last].filter(Boolean);
  [first, last] = [null, null];
  announce(`The frames are references now: ${labels().flat().join(", ")}`);
  draw();
  changed();
}

function toFrames() {
  [first, last] = [references[0], references[1] ?? null];
  references = [];
  announce("The references are the frames now");
  draw();
  changed();
}

function move(from, to) {
  if (to < 0 || to >= references.length || from === to) return false;
  const [item] = references.splice(from, 1);
  references.splice(to, 0, item);
  draw();
  changed();
  announce(`Now ${labels()[to].join(" and ")}, place ${to + 1} of ${references.length}`);
  return true;
}

function drop(item) {
  const place = references.indexOf(item);
  URL.revokeObjectURL(item.url);
  if (item === first) first = null;
  if (item === last) last = null;
  references = references.filter((other) => other !== item);
  complain("");
  draw();
  changed();
  announce(`${item.file.name} removed`);
  const next = byId("references").children[Math.min(place, references.length - 1)];
  (next?.querySelector(".remove") ?? document.querySelector(`.slot:not([hidden]) input[type=file]:enabled`))?.focus();
}

async function look(item) {
  if (item.kind === "image") return;
  if (item.kind === "video") item.sound = item.strict || null;
  item.seconds = await secondsOf(item.kind, item.url);
  if (item.kind === "video" && !item.strict) item.sound = await hasSound(item.file);
  draw();
  changed();
}

const mark = (slot) =>
  document.querySelectorAll(".slot").forEach((each) => each.classList.toggle("over", each === slot));

function draw() {
  drawFrame("first", first);
  drawFrame("last", last);
  byId("frames").hidden = !tasks.includes("fl2va");
  byId("reference-slot").hidden = !tasks.includes("ref2va");
  const named = labels();
  const place = byId("references");
  const focus = place.contains(document.activeElement) ? document.activeElement.dataset.key : null;
  place.replaceChildren(...references.map((item, i) => row(item, named[i], i)));
  if (focus) place.querySelector(`[data-key="${focus}"]`)?.focus();
  byId("to-references").hidden = !(first || last) || !tasks.includes("ref2va");
  const pictures = references.every((item) => item.kind === "image");
  byId("to-frames").hidden = !references.length || references.length > 2 || !pictures || !tasks.includes("fl2va");
  document.querySelectorAll("#frames input").forEach((input) => (input.disabled = references.length > 0));
  byId("frames").classList.toggle("off", references.length > 0);
  byId("task").textContent = told();
}

function told() {
  if (first && last) return "From the first frame to the last";
  if (first) return "From a first frame on";
  if (last) return "Towards a last frame";
  if (!references.length) return "From text alone";
  const kinds = Object.entries(NOUNS).map(([kind, noun]) => [references.filter((item) => item.kind === kind).length, noun]);
  const parts = kinds.filter(([n]) => n).map(([n, noun]) => count(n, noun));
  return `With ${parts.join(", ").replace(/, ([^,]*)$/, " and $1")} as ${references.length > 1 ? "references" : "a reference"}`;
}

function drawFrame(slot, item) {
  const place = byId(`${slot}-frame`);
  place.querySelector(".filled")?.remove();
  place.classList.toggle("full", Boolean(item));
  if (item) place.append(frame(slot, item));
}

function frame(slot, item) {
  const remove = h("button", { type: "button", class: "remove", onclick: () => drop(item) }, "×");
  remove.setAttribute("aria-label", `Remove the ${FRAMES[slot].toLowerCase()}`);
  return h("div", { class: "filled", data: { item: item.id } }, h("img", { src: item.url, alt: item.file.name }),
    h("span", { class: "tag" }, `${FRAMES[slot]} · Picture ${item === last && first ? 2 : 1}`), remove, h("p", { class: "error" }));
}

function row(item, named, i) {
  const label = named.map((name) => `<${name}>`).join(" ");
  const grip = h("button", { type: "button", class: "grip", data: { key: `grip-${item.id}` } }, "⠿");
  grip.setAttribute("aria-label", `${named.join(" and ")}: move with the arrow keys, place ${i + 1} of ${references.length}`);
  const remove = h("button", { type: "button", class: "remove", data: { key: `remove-${item.id}` }, onclick: () => drop(item) }, "×");
  remove.setAttribute("aria-label", `Remove ${named.join(" and ")}`);
  const into = h("button", { type: "button", class: "label", data: { key: `label-${item.id}` }, onclick: () => insertLabel(named) }, label);
  into.title = "Put this name into the prompt";
  const facts = [bytes(item.file.size), item.seconds ? duration(item.seconds) : "", sound(item)].filter(Boolean).join(" · ");
  return h("li", { data: { item: item.id } }, grip, (item.view ??= thumb(item)),
    h("div", { class: "about" }, into, h("span", { class: "name" }, item.file.name), h("span", { class: "dim" }, facts)),
    remove, item.kind === "image" ? null : cut(item), h("p", { class: "error" }));
}

function sound(item) {
  if (item.kind !== "video") return "";
  return { true: "with sound", false: "silent", null: "may have sound" }[item.sound];
}

function thumb(item) {
  if (item.kind === "image") return h("img", { class: "thumb", src: item.url, alt: "" });
  if (item.kind === "audio") return h("span", { class: "thumb note", "aria-hidden": "true" }, "♪");
  const clip = h("video", { class: "thumb", src: `${item.url}#t=0.1`, preload: "metadata", "aria-hidden": "true" });
  clip.muted = true;
  return clip;
}

function cut(item) {
  const input = (name, hint) => {
    const field = h("input", { type: "number", min: 0, step: "any", placeholder: hint, inputmode: "decimal", data: { key: `${name}-${item.id}` } });
    if (item[name] !== undefined) field.value = plain(item[name]);
    field.addEventListener("input", () => (item[name] = field.value === "" ? undefined : field.valueAsNumber));
    return h("label", {}, name === "start" ? "from" : "to", field, "s");
  };
  return h("div", { class: "cut" }, input("start", "0"), input("end", item.seconds ? plain(item.seconds) : "end"));
}
