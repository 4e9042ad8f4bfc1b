// The prompt box: the sections that released prompts are made of, dialogue tags, and the names of references.

import { byId, h } from "./dom.js";
import { labels, task } from "./media.js";

const DESCRIPTION = "integrated_multimodal_description";
const SECTIONS = [DESCRIPTION, "overall_soundscape", "non_diegetic_music"];
const HEADS = new RegExp(`^(${SECTIONS.join("|")}):`, "gm");

let box;
let most = 7000;

/** Get ready. */
export function startPrompt() {
  box = byId("prompt");
  box.addEventListener("input", drawPrompt);
  for (const button of document.querySelectorAll("[data-section]")) {
    button.addEventListener("click", () => section(button.dataset.section));
  }
  byId("dialogue").addEventListener("click", dialogue);
}

/** The most characters a prompt may have. */
export function setMost(characters) {
  most = characters;
  drawPrompt();
}

/** Put the names of a reference at the cursor. */
export function insertLabels(names) {
  const before = box.value.slice(0, box.selectionStart);
  write(`${/\S$/.test(before) ? " " : ""}${names.map((name) => `<${name}>`).join(" ")}`);
}

/** Show how long the prompt is, and which references it does not name yet. */
export function drawPrompt() {
  const size = [...box.value].length;
  byId("prompt-size").textContent = size > most * 0.8 ? `${size.toLocaleString("en")} of ${most.toLocaleString("en")}` : "";
  const missing = task() === "ref2va" ? labels().filter((names) => !names.some((name) => isNamed(name))) : [];
  const chips = missing.map((names) =>
    h("button", { type: "button", class: "chip", onclick: () => insertLabels(names) }, names.map((name) => `<${name}>`).join(" ")),
  );
  byId("unnamed").hidden = missing.length === 0;
  byId("unnamed-labels").replaceChildren(...chips);
  for (const button of document.querySelectorAll("[data-section]")) {
    button.classList.toggle("present", new RegExp(`^${button.dataset.section}:`, "m").test(box.value));
  }
}

const isNamed = (name) => box.value.includes(`<${name}>`);

// Through the editing command, so that the browser's undo takes it back.
function write(text) {
  box.focus();
  if (!document.execCommand?.("insertText", false, text)) {
    box.setRangeText(text, box.selectionStart, box.selectionEnd, "end");
    box.dispatchEvent(new Event("input", { bubbles: true }));
  }
}

// Go to the section's end, or make it at its place among the others.
function section(name) {
  box.focus();
  const heads = [...box.value.matchAll(HEADS)];
  const own = heads.findIndex((head) => head[1] === name);
  if (own >= 0) {
    const end = heads[own + 1]?.index ?? box.value.length;
    const place = box.value.slice(0, end).trimEnd().length;
    box.setSelectionRange(place, place);
    return;
  }
  const text = box.value.trim();
  if (!heads.length && text && name !== DESCRIPTION) {
    // the sections are read together: what stands there without a head is the description
    box.setSelectionRange(0, box.value.length);
    write(`${DESCRIPTION}: ${text}\n${name}: `);
    return;
  }
  const next = heads.find((head) => SECTIONS.indexOf(head[1]) > SECTIONS.indexOf(name));
  if (!heads.length) {
    box.setSelectionRange(0, 0);
    write(`${name}: `);
    box.setSelectionRange(box.value.length, box.value.length);
  } else if (next) {
    box.setSelectionRange(next.index, next.index);
    write(`${name}: \n`);
    box.setSelectionRange(box.selectionStart - 1, box.selectionStart - 1);
  } else {
    box.setSelectionRange(box.value.trimEnd().length, box.value.length);
    write(`\n${name}: `);
  }
}

function dialogue() {
  const [start, end] = [box.selectionStart, box.selectionEnd];
  const chosen = box.value.slice(start, end);
  box.focus();
  write(`<d>${chosen}</d>`);
  if (!chosen) box.setSelectionRange(start + 3, start + 3);
}
