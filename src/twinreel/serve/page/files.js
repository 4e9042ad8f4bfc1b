// What a file is, before it is sent: kind, length, whether a clip has sound, and a picture of it.

const ENDINGS = {
  image: ["png", "jpg", "jpeg", "webp", "gif", "bmp", "tif", "tiff", "avif", "heic"],
  video: ["mp4", "m4v", "mov", "webm", "mkv", "avi", "mpg", "mpeg", "ts"],
  audio: ["wav", "mp3", "m4a", "aac", "flac", "ogg", "opus"],
};
const HEAD = 4 << 20; // bytes looked through at either end of a clip for its list of tracks

/** "image", "video", "audio", or null for anything else. */
export function kindOf(file) {
  const said = file.type.split("/")[0];
  if (said in ENDINGS) return said;
  const ending = file.name.split(".").pop().toLowerCase();
  return Object.keys(ENDINGS).find((kind) => ENDINGS[kind].includes(ending)) ?? null;
}

/** Whether a clip has a sound track, as far as its tracks' names tell: true, false, or null for unknown. */
export async function hasSound(file) {
  const ends = [file.slice(0, HEAD), file.slice(Math.max(HEAD, file.size - HEAD))];
  const text = (await Promise.all(ends.map(async (part) => latin(await part.arrayBuffer())))).join("");
  if (text.includes("soun") && /hdlr[\s\S]{8}soun/.test(text)) return true;
  if (/hdlr[\s\S]{8}vide/.test(text)) return false;
  if (/A_(OPUS|VORBIS|AAC|PCM|FLAC|MPEG)/.test(text)) return true;
  return /V_(VP8|VP9|AV1|MPEG)/.test(text) ? false : null;
}

const latin = (buffer) => new TextDecoder("latin1").decode(buffer);

/** Seconds of a clip or sound, null when the browser cannot read it (the server may still). */
export function secondsOf(kind, url) {
  return new Promise((done) => {
    const player = document.createElement(kind);
    player.preload = "metadata";
    player.onloadedmetadata = () => done(Number.isFinite(player.duration) ? player.duration : null);
    player.onerror = () => done(null);
    player.src = url;
  });
}

/** The last of `frames` frames of a video on this server, 24 a second, as a PNG file. */
export async function lastFrame(url, frames, name) {
  const player = document.createElement("video");
  player.muted = true;
  player.preload = "auto";
  player.src = url;
  await happened(player, "loadeddata");
  player.currentTime = (frames - 0.5) / 24; // the middle of its time on the screen
  await happened(player, "seeked");
  const canvas = document.createElement("canvas");
  canvas.width = player.videoWidth;
  canvas.height = player.videoHeight;
  canvas.getContext("2d").drawImage(player, 0, 0);
  const blob = await new Promise((done) => canvas.toBlob(done, "image/png"));
  player.removeAttribute("src");
  if (!blob) throw new Error("the browser did not give the frame");
  return new File([blob], `${name}.png`, { type: "image/png" });
}

function happened(player, event) {
  return new Promise((done, failed) => {
    player.addEventListener(event, done, { once: true });
    player.addEventListener("error", () => failed(new Error("this browser cannot play the video")), { once: true });
  });
}
