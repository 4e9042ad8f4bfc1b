// The page's beginning: puts the parts together and keeps the line to the server.

import { call, get, Refused, whenKeyIsNeeded } from "./api.js";
import { setModel, startForm } from "./compose.js";
import { announce, byId, isActive } from "./dom.js";
import { learn, listen, refresh } from "./jobs.js";
import { startLists } from "./lists.js";
import { open, selected, setViewerModel, startViewer, title } from "./viewer.js";

const SELDOM = 10000, OFTEN = 1500; // milliseconds between looks at the engine, and at one that does not run yet
const STATES = { ready: "Ready", starting: "Starting", restarting: "Starting again", failed: "Not running", stopped: "Stopped" };

let bundled = false;
let timer = 0; // of the next look

start();

async function start() {
  theme();
  keys();
  startForm(queued);
  document.addEventListener("queued", (event) => queued(event.detail));
  document.addEventListener("trouble", (event) => trouble(event.detail));
  document.addEventListener("unreached", (event) => event.detail.status !== 401 && unreached());
  document.addEventListener("reached", () => byId("trouble").dataset.kind === "line" && trouble(""));
  listen(tell);
  await look();
  await startLists(bundled);
  await refresh();
  startViewer();
}

// The weights and the engine's state; asked again and again, because an engine starts, warms up and may fail.
async function look() {
  clearTimeout(timer);
  let pause = SELDOM;
  try {
    const [models, ready] = await Promise.all([get("/v1/models"), call("GET", "/ready")]);
    const model = models.data[0];
    if (!ready.ready) pause = OFTEN;
    bundled = model.bundled;
    setModel(model);
    setViewerModel(model);
    byId("model").textContent = model.bundled ? `${model.id}, a miniature for trying things out` : model.id;
    state(STATES[ready.engine] ?? ready.engine, ready.ready ? "good" : ready.engine === "failed" || ready.cause ? "bad" : "busy");
    const told = ready.engine === "ready" ? "No new videos for now" : "The engine does not run";
    if (ready.cause) trouble(`${told}: ${ready.cause}`, "engine");
    else if (byId("trouble").dataset.kind === "engine") trouble("");
  } catch (error) {
    if (!(error instanceof Refused)) throw error;
    if (error.status === 401) state("Locked", "bad");
    else unreached();
  }
  clearTimeout(timer); // two looks may have overlapped
  timer = setTimeout(look, pause);
}

function state(text, kind) {
  const place = byId("engine");
  if (place.textContent !== text) place.textContent = text;
  place.dataset.kind = kind;
}

function unreached() {
  state("No answer", "bad");
  trouble("The server does not answer. What was queued is safe; this page goes on when it is back.", "line");
}

function trouble(text, kind = "act") {
  const place = byId("trouble");
  place.hidden = !text;
  place.dataset.kind = kind;
  if (place.textContent !== text) place.textContent = text;
  if (kind === "act" && text) setTimeout(() => place.textContent === text && trouble(""), 15000);
}

function queued(job) {
  learn(job);
  announce(job.variants.length > 1 ? `${job.variants.length} videos are queued` : "The video is queued");
  open(job.id);
  refresh();
}

// Beginnings and ends are said aloud, steps are not.
function tell(job, before) {
  if (!job || !before || job.status === before.status) return;
  if (job.status === "in_progress") announce(`Started: ${title(job)}`);
  else if (!isActive(job)) announce(`${{ completed: "Done", failed: "Failed", cancelled: "Cancelled" }[job.status]}: ${title(job)}`);
  if (job.status !== "completed") return;
  look(); // a call has been measured
  if (selected() === null) open(job.id, false);
}

function theme() {
  const button = byId("theme");
  const choices = ["auto", "light", "dark"];
  const apply = (name) => {
    if (name === "auto") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = name;
    button.textContent = `Theme: ${name}`;
  };
  let chosen = localStorage.getItem("theme") ?? "auto";
  if (!choices.includes(chosen)) chosen = "auto";
  apply(chosen);
  button.addEventListener("click", () => {
    chosen = choices[(choices.indexOf(chosen) + 1) % choices.length];
    localStorage.setItem("theme", chosen);
    apply(chosen);
  });
}

// The key goes to the server once and comes back as a cookie that scripts cannot read.
function keys() {
  const dialog = byId("key-dialog");
  let waiting = null; // everyone who needs the key waits for the one dialog
  let answer = () => {};
  let declined = false; // then nobody is asked again before they say so
  const draw = () => {
    byId("sign-out").hidden = !declined && !localStorage.getItem("signed");
    byId("sign-out").textContent = declined ? "Sign in" : "Sign out";
  };
  draw();
  whenKeyIsNeeded(() => {
    if (declined) return false;
    waiting ??= new Promise((done) => {
      answer = (is) => {
        waiting = null;
        done(is);
      };
      if (dialog.open) dialog.close();
      dialog.showModal();
    });
    return waiting;
  });
  byId("key-form").addEventListener("submit", async (event) => {
    event.preventDefault();
    byId("key-error").textContent = "";
    try {
      await call("POST", "/v1/session", { key: byId("key").value.trim() });
      byId("key").value = "";
      dialog.close();
      localStorage.setItem("signed", "yes");
      draw();
      answer(true);
    } catch (error) {
      byId("key-error").textContent = error.status === 401 ? "That is not the key." : error.message;
      byId("key").select();
    }
  });
  const later = () => {
    dialog.close();
    declined = true;
    draw();
    answer(false);
  };
  byId("key-later").addEventListener("click", later);
  dialog.addEventListener("cancel", (event) => (event.preventDefault(), later()));
  byId("sign-out").addEventListener("click", async () => {
    localStorage.removeItem("signed");
    if (!declined) await call("DELETE", "/v1/session").catch(() => {});
    location.assign(location.pathname);
  });
}

