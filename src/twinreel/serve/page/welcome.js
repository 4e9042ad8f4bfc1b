// What stands there while nothing has been made: sentences to begin with.

import { byId, h } from "./dom.js";

// The bundled miniature knows a small world of shapes and sounds; larger weights know ours.
const MINIATURE = [
  "a red ball bounces on the left and a low bell rings at every bounce.",
  "a green triangle circles in the middle on a dark background, with a high click at every turn.",
  "a blue square slides from left to right while a low hum is heard.",
];
const WORLD = [
  "A red ball bounces across a wooden floor; each bounce is a dull knock.",
  "A tram turns the corner on a wet evening street. Its wheels squeal, then the bell rings twice.",
  "Close on an old fisherman mending a net. He mutters <d>It will hold.</d> Gulls cry, ropes creak.",
];

/** Show or hide the beginnings; a chosen sentence goes into the prompt. */
export function welcome(show, bundled) {
  byId("welcome").hidden = !show;
  if (!show || byId("examples").childElementCount) return;
  byId("examples").append(...(bundled ? MINIATURE : WORLD).map((text) => h("li", {}, h("button", { type: "button", onclick: () => take(text) }, text))));
}

function take(text) {
  const box = byId("prompt");
  box.value = text;
  box.dispatchEvent(new Event("input", { bubbles: true }));
  box.focus();
}
