// The server's HTTP interface: requests, errors with their fields, uploads, events, the session of a browser.

/** An answer from 400 on, or no answer (status 0). `field` is a path in the request, `wait` seconds to wait. */
export class Refused extends Error {
  constructor(status, error = {}, wait = null) {
    super(error.message || (status ? `The server answered ${status}.` : "The server does not answer."));
    this.status = status;
    this.type = error.type ?? "";
    this.field = error.field ?? null;
    this.wait = wait;
  }
}

let askForKey = async () => false;

/** `asked()` is called when the server wants its key, and resolves to whether there is a session now. */
export function whenKeyIsNeeded(asked) {
  askForKey = asked;
}

// Seeds go up to 2^63 - 1, more than a number of JavaScript holds: those stay text.
function parse(text) {
  return JSON.parse(text, (name, value, context) =>
    name === "seed" && !Number.isSafeInteger(value) && context?.source ? context.source : value,
  );
}

// What an answer says; Refused for an error, and for what is not the server's, such as a proxy's page.
function said(status, text, wait) {
  let value;
  try {
    value = status === 204 ? null : parse(text);
  } catch {
    value = undefined; // the status says enough
  }
  const answers = status < 400 || value?.ready === false; // /ready says no with a 503
  if (value === undefined || !answers) throw new Refused(status, value?.error ?? {}, wait ? Number(wait) : null);
  return value;
}

/** The decoded answer of one request. Throws Refused. */
export async function call(method, path, body = undefined, again = true) {
  const sent = { method, headers: {} };
  if (body !== undefined) {
    sent.body = JSON.stringify(body);
    sent.headers["content-type"] = "application/json";
  }
  let answer, text;
  try {
    answer = await fetch(path, sent);
    text = await answer.text(); // it may break off
  } catch {
    throw new Refused(0);
  }
  if (answer.status === 401 && path !== "/v1/session" && again && (await askForKey())) {
    return call(method, path, body, false);
  }
  return said(answer.status, text, answer.headers.get("retry-after"));
}

export const get = (path) => call("GET", path);
export const post = (path, body) => call("POST", path, body);
export const remove = (path) => call("DELETE", path);

/** JSON text of a request whose seed is text of digits. */
export function requestText(body) {
  const { seed, ...rest } = body;
  const text = JSON.stringify(rest);
  if (seed === undefined) return text;
  return `{"seed":${BigInt(seed)}${text === "{}" ? "" : ","}${text.slice(1)}`;
}

/**
 * Queue a request. `files[i]` travels as the part `media-i`, which the conditions name. `progress(share)` follows the
 * upload. Repeated with the same `once` it is queued only once. Throws Refused.
 */
export async function submit(body, files, once, progress = () => {}, again = true) {
  const answer = await send(requestText(body), files, once, progress);
  if (answer.status === 401 && again && (await askForKey())) return submit(body, files, once, progress, false);
  if (answer.status === 0) throw new Refused(0);
  return said(answer.status, answer.text, answer.wait);
}

// XMLHttpRequest, because fetch does not say how far an upload is.
function send(text, files, once, progress) {
  return new Promise((done) => {
    const request = new XMLHttpRequest();
    request.open("POST", "/v1/videos");
    request.setRequestHeader("idempotency-key", once);
    request.upload.onprogress = (event) => event.lengthComputable && progress(event.loaded / event.total);
    request.onload = () =>
      done({ status: request.status, text: request.responseText, wait: request.getResponseHeader("retry-after") });
    request.onerror = request.onabort = () => done({ status: 0, text: "", wait: null });
    if (files.length === 0) {
      request.setRequestHeader("content-type", "application/json");
      request.send(text);
      return;
    }
    const form = new FormData();
    form.append("request", text);
    files.forEach((file, i) => form.append(`media-${i}`, file, file.name));
    request.send(form);
  });
}

/** Text that no other request has. */
export function unique() {
  const words = crypto.getRandomValues(new Uint32Array(4));
  return Array.from(words, (word) => word.toString(16).padStart(8, "0")).join("");
}

/** A seed nobody chose. */
export const randomSeed = () => String(crypto.getRandomValues(new Uint32Array(1))[0] % 1e9);

/** A medium of an earlier request as a File. */
export async function fetchInput(url, name) {
  const answer = await fetch(url);
  if (!answer.ok) throw new Refused(answer.status, { message: `${name} is no longer on the server.` });
  const blob = await answer.blob();
  const ending = { "image/jpeg": "jpg", "audio/mpeg": "mp3" }[blob.type] ?? blob.type.split("/")[1] ?? "bin";
  return new File([blob], `${name}.${ending}`, { type: blob.type });
}

const EVENTS = ["queued", "stage", "step", "preview", "completed", "failed", "cancelled"];

/**
 * Follow a job: `told(job)` at every change. Returns what ends it. The browser connects again by itself, but not after
 * an HTTP error: then `lost()`.
 */
export function follow(id, told, lost) {
  const source = new EventSource(`/v1/videos/${encodeURIComponent(id)}/events`);
  for (const name of EVENTS) {
    source.addEventListener(name, (event) => {
      const job = parse(event.data);
      if (!["queued", "in_progress"].includes(job.status)) source.close();
      told(job);
    });
  }
  source.addEventListener("error", () => source.readyState === EventSource.CLOSED && lost());
  return () => source.close();
}
