// Elements, words and numbers: what every part of the page uses.

/** The element with this id. */
export const byId = (id) => document.getElementById(id);

/** A new element; `on...` keys are listeners, `data` a record, null and false attributes are left out. */
export function h(tag, given = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(given)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (name === "data") Object.assign(made.dataset, value);
    else if (name === "class") made.className = value;
    else made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return made;
}

/** Say something to people who hear the page. The same words twice are said twice. */
export function announce(text) {
  const place = byId("announcer");
  place.textContent = "";
  setTimeout(() => (place.textContent = text), 30);
}

/** "1 min 20 s" */
export function duration(seconds) {
  if (seconds === null || seconds === undefined || !Number.isFinite(seconds)) return "";
  if (seconds < 10) return `${Math.max(0, seconds).toFixed(seconds < 1 ? 1 : 0)} s`;
  const whole = Math.round(seconds);
  if (whole < 60) return `${whole} s`;
  const minutes = Math.floor(whole / 60);
  if (minutes < 60) return whole % 60 && minutes < 10 ? `${minutes} min ${whole % 60} s` : `${minutes} min`;
  return `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

/** "3.2 MB" */
export function bytes(count) {
  if (!count) return "";
  const units = ["B", "kB", "MB", "GB"];
  let size = count, unit = 0;
  while (size >= 1000 && unit < units.length - 1) [size, unit] = [size / 1000, unit + 1];
  return `${size >= 100 || unit === 0 ? Math.round(size) : size.toFixed(1)} ${units[unit]}`;
}

/** "just now", "5 min ago", or a date. */
export function ago(unix) {
  const seconds = Date.now() / 1000 - unix;
  if (seconds < 45) return "just now";
  if (seconds < 3600) return `${Math.max(1, Math.round(seconds / 60))} min ago`;
  if (seconds < 86400) return `${Math.round(seconds / 3600)} h ago`;
  return new Date(unix * 1000).toLocaleDateString(undefined, { day: "numeric", month: "short", year: "numeric" });
}

/** "1 call", "49 calls" */
export const count = (number, word) => `${number.toLocaleString("en")} ${word}${number === 1 ? "" : "s"}`;

/** A number as text with at most two decimals. */
export const plain = (number) => String(Math.round(number * 100) / 100);

export const ACTIVE = ["queued", "in_progress"];
export const isActive = (job) => ACTIVE.includes(job.status);
export const TASKS = { t2va: "Text", fl2va: "Frames", ref2va: "References" };
export const STATUSES = {
  queued: "Waiting",
  in_progress: "Running",
  completed: "Done",
  failed: "Failed",
  cancelled: "Cancelled",
};

const STAGES = {
  start: "Starting",
  load: "Loading weights",
  read: "Reading the media",
  encode: "Reading the prompt",
  mux: "Writing the file",
};

/** What a job is doing, in a few words. */
export function doing(job) {
  if (job.cancelling) return "Cancelling";
  if (job.status === "queued") {
    if (job.position === null || job.position === undefined) return "Waiting";
    return job.position === 0 ? "Next in line" : `${count(job.position, "video")} ahead`;
  }
  if (job.status !== "in_progress") return STATUSES[job.status];
  const at = job.running;
  if (!at) return "Starting";
  if (at.stage === "denoise") return at.total ? `Step ${Math.min(at.done + 1, at.total)} of ${at.total}` : "Sampling";
  if (at.stage === "decode") return at.total > 1 ? `Frame ${at.done} of ${at.total}` : "Making the sound";
  return STAGES[at.stage] ?? at.stage;
}

/** Seconds left as words, empty when nobody knows. The server's figure is that of the present stage. */
export function left(job) {
  const at = job.status === "in_progress" && !job.cancelling ? job.running : null;
  if (!at?.eta) return "";
  return at.stage === "denoise" ? `about ${duration(at.eta)} of steps left` : `about ${duration(at.eta)} left`;
}
