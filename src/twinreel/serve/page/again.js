// New requests from old ones: the same with another seed, a copy to edit, the next piece of a film.

import { fetchInput, randomSeed, submit, unique } from "./api.js";
import { continueFrom, load } from "./compose.js";
import { announce, byId } from "./dom.js";
import { lastFrame } from "./files.js";

/** Queue the same request with another seed. */
export async function again(job) {
  const files = await media(job);
  const conditions = job.request.conditions.map((item, i) => ({ ...item, uri: `upload:media-${i}` }));
  const made = await submit({ ...job.request, conditions, seed: randomSeed() }, files, unique());
  document.dispatchEvent(new CustomEvent("queued", { detail: made }));
}

/** Put the request into the form. */
export async function edit(job) {
  await load(job.request, await media(job));
  toForm("The request is in the form");
}

/** Start a request whose first frame is the last one of this video. */
export async function extend(job) {
  await continueFrom(await lastFrame(job.links.content, job.frames, "last-frame"));
  toForm("The last frame is the first frame of the next video");
}

const media = (job) => Promise.all(job.request.conditions.map((item, i) => fetchInput(item.uri, `medium-${i + 1}`)));

function toForm(told) {
  byId("make").scrollIntoView({ block: "start" });
  byId("prompt").focus({ preventScroll: true });
  announce(told);
}
