// The form: from fields to a request, from a request back to fields, and errors to where they belong.

import { randomSeed, Refused, submit, unique } from "./api.js";
import { byId, count, duration, h, plain } from "./dom.js";
import { clear, complain, complainAt, conditions, items, restore, setTasks, sounding, startMedia, task } from "./media.js";
import { drawPrompt, insertLabels, setMost, startPrompt } from "./prompt.js";

const LAST_SEED = 2n ** 63n - 1n;
const KEPT = ["prompt", "length", "seed", "steps", "policy", "short-edge", "shift-video", "shift-audio", "noise"];
// Where a field of the request is asked for: longest match first.
const PLACES = [
  ["prompt", "prompt"],
  ["target.duration_seconds", "length"],
  ["target.aspect_ratio", "shape"],
  ["target.width", "shape"],
  ["target.height", "shape"],
  ["target.short_edge", "short-edge"],
  ["seed", "seed"],
  ["num_inference_steps", "steps"],
  ["policy", "policy"],
  ["n", "variants"],
  ["flow_shift", "shift-video"],
  ["audio_flow_shift", "shift-audio"],
  ["noise", "noise"],
  ["task", "media"],
];

let model = null;
let chosenSeed = false; // by the person, and so kept for the next video
let once = null; // the key of a request that was sent and may not have arrived

/** Get ready; `queued(job)` is called with the first job of a request that was taken. */
export function startForm(queued) {
  startPrompt();
  startMedia(() => ((once = null), drawPrompt(), draw()), insertLabels);
  const form = byId("make");
  form.addEventListener("submit", (event) => (event.preventDefault(), send(queued)));
  form.addEventListener("input", (event) => {
    once = null;
    clearError(event.target.closest("[data-field]"));
    keep();
    draw();
  });
  byId("prompt").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) form.requestSubmit();
  });
  byId("seed").addEventListener("input", (event) => (chosenSeed = event.isTrusted));
  byId("dice").addEventListener("click", () => setValue("seed", randomSeed()));
  byId("length-slider").addEventListener("input", (event) => (byId("length").value = event.target.value));
  byId("start-over").addEventListener("click", () => model && startOver());
}

/** Take in what the server says of its weights. */
export function setModel(given) {
  const isFirst = model === null;
  model = given;
  const { limits, defaults } = model;
  bound("length", limits.duration_seconds, "any");
  bound("length-slider", limits.duration_seconds, 0.5);
  bound("steps", limits.steps, 1);
  bound("variants", [1, limits.variants], 1);
  setTasks(model.tasks);
  setMost(limits.prompt_characters[1]);
  byId("short-edge").placeholder = defaults.short_edge;
  byId("shift-video").placeholder = plain(defaults.shifts[0]);
  byId("shift-audio").placeholder = plain(defaults.shifts[1]);
  if (!isFirst) return draw();
  byId("shapes").replaceChildren(...["auto", ...limits.aspect_ratios, "custom"].map(shapeChoice));
  byId("policy").replaceChildren(...model.policies.map((item) => h("option", { value: item.name }, policyName(item))));
  startOver();
  recall();
  draw();
}

const policyName = ({ name, calls }) => (calls < model.defaults.steps - 1 ? `${name} (${calls} calls)` : name);

function shapeChoice(name, i) {
  const size = model.sizes[i - 1]?.replace("x", " × ") ?? (name === "auto" ? "of the first frame, or 16:9" : "width × height");
  const [wide, high] = name.includes(":") ? name.split(":").map(Number) : [1, 1];
  const icon = h("i", { class: name.includes(":") ? "ratio" : `ratio ${name}`, "aria-hidden": "true" });
  const scale = 20 / Math.max(wide, high);
  icon.style.width = `${wide * scale}px`;
  icon.style.height = `${high * scale}px`;
  return h("label", { title: size }, h("input", { type: "radio", name: "shape", value: name }),
    h("span", {}, icon, name === "custom" ? "Size" : name === "auto" ? "Auto" : name, h("span", { class: "unseen" }, ` ${size}`)));
}

function bound(id, [low, high], step) {
  Object.assign(byId(id), { min: low, max: high, step });
}

function setValue(id, value) {
  byId(id).value = value;
  byId(id).dispatchEvent(new Event("input", { bubbles: true }));
}

const shape = () => document.querySelector("[name=shape]:checked")?.value ?? "auto";
const setShape = (name) => {
  const choice = [...document.querySelectorAll("[name=shape]")].find((radio) => radio.value === name);
  if (choice) choice.checked = true;
  return Boolean(choice);
};

function startOver() {
  const { defaults } = model;
  byId("make").reset();
  clear();
  clearErrors();
  fill({ prompt: "", target: {} });
  byId("length").value = Math.min(Math.max(defaults.duration_seconds, model.limits.duration_seconds[0]), model.limits.duration_seconds[1]);
  keep();
  draw();
}

/** Put a request into the fields; `files` are those of its conditions, in order. */
export async function load(request, files) {
  clearErrors();
  fill(request);
  chosenSeed = true;
  restore((request.conditions ?? []).map((condition, i) => ({ file: files[i], condition })));
  keep();
  draw();
}

function fill(request) {
  const { defaults } = model;
  const target = request.target ?? {};
  byId("prompt").value = request.prompt;
  byId("length").value = plain(target.duration_seconds ?? defaults.duration_seconds);
  byId("length-of-sound").checked = false;
  byId("seed").value = request.seed ?? randomSeed();
  byId("steps").value = request.num_inference_steps ?? defaults.steps;
  byId("variants").value = 1;
  const policy = request.policy ?? defaults.policy;
  if (![...byId("policy").options].some((option) => option.value === policy)) byId("policy").append(h("option", { value: policy }, policy));
  byId("policy").value = policy;
  byId("short-edge").value = target.short_edge ?? "";
  byId("shift-video").value = request.flow_shift ?? "";
  byId("shift-audio").value = request.audio_flow_shift ?? "";
  byId("noise").value = request.noise ?? "official";
  const ratio = target.aspect_ratio ?? "auto";
  setShape(target.width ? "custom" : ratio) || setShape("auto");
  byId("width").value = target.width ?? "";
  byId("height").value = target.height ?? "";
  byId("more").open = Boolean(target.short_edge || request.flow_shift || request.noise === "sequential");
  drawPrompt();
}

/** Make a picture the first frame of the next request. */
export async function continueFrom(picture) {
  restore([{ file: picture, condition: { type: "image", role: "keyframe", frame_index: 0 } }]);
  setShape("auto");
  setValue("seed", randomSeed());
}

// Fields survive a reload, media do not.
function keep() {
  const fields = Object.fromEntries(KEPT.map((id) => [id, byId(id).value]));
  sessionStorage.setItem("form", JSON.stringify({ ...fields, shape: shape() }));
}

function recall() {
  const fields = JSON.parse(sessionStorage.getItem("form") ?? "{}");
  for (const id of KEPT) if (fields[id] !== undefined) byId(id).value = fields[id] || byId(id).value;
  setShape(fields.shape) || setShape("auto");
  drawPrompt();
}

// Everything on the form that follows from something else on it.
function draw() {
  if (!model) return;
  const steps = byId("steps").valueAsNumber, variants = byId("variants").valueAsNumber || 1;
  const chosen = model.policies.find((item) => item.name === byId("policy").value);
  byId("cost").textContent = Number.isFinite(steps) ? cost(chosen, steps) : "";
  byId("policy-note").textContent = chosen && chosen.name !== model.defaults.policy ? note(chosen) : "";
  const onlySound = task() === "ref2va" && sounding() === 1;
  byId("sound-length").hidden = !onlySound;
  const bySound = onlySound && byId("length-of-sound").checked;
  byId("length").disabled = byId("length-slider").disabled = bySound;
  byId("length-slider").value = byId("length").value;
  byId("size").hidden = shape() !== "custom";
  byId("shape-size").textContent = shapeSize();
  byId("send").textContent = variants > 1 ? `Make ${variants} videos` : "Make the video";
}

// "50 steps are 49 model calls; forecast:fast makes 21 of them: about 42 s at 2 s a call, measured on the last videos."
function cost(chosen, steps) {
  const every = Math.max(1, steps - 1);
  const most = model.defaults.steps - 1; // the policies' calls are those of a request with the default steps
  const open = !chosen || (chosen.calls === most && chosen.name !== model.defaults.policy);
  const calls = open ? every : Math.max(1, Math.round((chosen.calls / most) * every));
  let words = `${count(steps, "step")} are ${count(every, "model call")}`;
  if (open) words += `; this policy decides while running how many of them it makes`;
  else if (calls < every) words += `; ${chosen.name} makes ${every === most ? "" : "about "}${calls} of them`;
  const seconds = model.seconds_per_call;
  if (!seconds) return `${words}. How long they take shows after the first video.`;
  const each = seconds < 0.1 ? `${(seconds * 1000).toPrecision(2)} ms` : `${seconds.toPrecision(2)} s`;
  return `${words}: ${open ? "at most" : "about"} ${duration(calls * seconds)} at ${each} a call, as in the last video.`;
}

const note = (chosen) => {
  const text = chosen.note.replaceAll("`", "");
  return text && sentence(text);
};

function shapeSize() {
  const name = shape();
  const size = model.sizes[model.limits.aspect_ratios.indexOf(name)];
  if (size && !byId("short-edge").value) return `${size.replace("x", " × ")} pixels`;
  return name === "auto" ? "The shape of the first frame, otherwise 16:9" : "";
}

// The request as the fields say it; throws Refused for what cannot be said.
function read() {
  if (!model) throw new Refused(0);
  const number = (id, place) => {
    const field = byId(id);
    if (field.validity.badInput || field.value === "") throw new Refused(422, { field: place, message: "needs a number" });
    return field.valueAsNumber;
  };
  const seed = byId("seed").value.trim();
  const prompt = byId("prompt").value;
  if (!prompt.trim()) throw new Refused(422, { field: "prompt", message: "is empty; describe the picture and the sound" });
  if (!/^\d{1,19}$/.test(seed) || BigInt(seed) > LAST_SEED) {
    throw new Refused(422, { field: "seed", message: `is a whole number from 0 to ${LAST_SEED}` });
  }
  const target = {};
  if (byId("sound-length").hidden || !byId("length-of-sound").checked) {
    target.duration_seconds = number("length", "target.duration_seconds");
  }
  if (shape() === "custom") [target.width, target.height] = [number("width", "target.width"), number("height", "target.height")];
  else target.aspect_ratio = shape();
  const body = { task: task(), prompt, conditions: conditions(), target, seed };
  body.num_inference_steps = number("steps", "num_inference_steps");
  body.policy = byId("policy").value;
  const variants = number("variants", "n");
  if (variants !== 1) body.n = variants;
  if (byId("short-edge").value) target.short_edge = number("short-edge", "target.short_edge");
  if (byId("shift-video").value || byId("shift-audio").value) {
    body.flow_shift = number("shift-video", "flow_shift");
    body.audio_flow_shift = number("shift-audio", "audio_flow_shift");
  }
  if (byId("noise").value !== "official") body.noise = byId("noise").value;
  return body;
}

async function send(queued) {
  const button = byId("send");
  if (button.getAttribute("aria-disabled") === "true") return;
  clearErrors();
  button.setAttribute("aria-disabled", "true");
  const files = items().map((item) => item.file);
  try {
    const body = read();
    once ??= unique();
    const job = await submit(body, files, once, (share) => {
      button.textContent = files.length && share < 1 ? `Sending, ${Math.round(share * 100)} %` : "Checking";
    });
    once = null;
    if (!chosenSeed) setValue("seed", randomSeed());
    queued(job);
  } catch (error) {
    if (!(error instanceof Refused)) throw error;
    // not taken: the next try is another request. From 500 on a proxy may speak for a server that has taken it
    if (error.status > 0 && error.status < 500) once = null;
    show(error);
  } finally {
    button.setAttribute("aria-disabled", "false");
    draw();
  }
}

/** Show an error where it belongs: at its field, otherwise over the button. */
export function show(error) {
  const field = error.field ?? "";
  const medium = /^(?:conditions\[|media-)(\d+)/.exec(field);
  const wait = error.wait ? ` Try again in ${duration(error.wait)}.` : "";
  if (medium) return complainAt(Number(medium[1]), sentence(error.message));
  if (field === "conditions" || field === "task") {
    complain(sentence(error.message));
    return byId("media").scrollIntoView({ block: "center" });
  }
  const place = PLACES.find(([name]) => name === field)?.[1];
  if (error.status !== 422 || !place) {
    const name = field && field !== "request" ? `${field} ` : "";
    byId("form-error").textContent = `${name ? name + error.message : sentence(error.message)}${wait}`;
    return byId("send").focus();
  }
  const group = document.querySelector(`[data-field="${place}"]`);
  group.closest("details")?.setAttribute("open", "");
  group.classList.add("invalid");
  group.querySelector(".error").textContent = sentence(error.message);
  const input = group.querySelector("textarea, select, input:checked, input:not([type=radio], [type=range])");
  input.setAttribute("aria-invalid", "true");
  input.focus();
}

function sentence(text) {
  const first = text.charAt(0).toUpperCase() + text.slice(1);
  return /[.!?]$/.test(first) ? first : `${first}.`;
}

function clearError(group) {
  if (!group?.classList.contains("invalid")) return;
  group.classList.remove("invalid");
  group.querySelector(".error").textContent = "";
  group.querySelectorAll("[aria-invalid]").forEach((input) => input.removeAttribute("aria-invalid"));
}

function clearErrors() {
  document.querySelectorAll("[data-field].invalid").forEach(clearError);
  complain("");
  byId("form-error").textContent = "";
}
