// The texts of the page that are too faint: [text, ratio, colour, ground] where the ratio is below 4.5 (3 for large text).
const parts = (colour) => {
  const canvas = (window.probe ??= new OffscreenCanvas(1, 1).getContext("2d", { willReadFrequently: true }));
  canvas.clearRect(0, 0, 1, 1);
  canvas.fillStyle = colour;
  canvas.fillRect(0, 0, 1, 1);
  const [r, g, b, a] = canvas.getImageData(0, 0, 1, 1).data;
  return [r, g, b, a / 255];
};
const over = (top, ground) => [0, 1, 2].map((i) => top[i] * top[3] + ground[i] * (1 - top[3]));
const light = ([r, g, b]) => {
  const line = (v) => ((v /= 255) <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
  return 0.2126 * line(r) + 0.7152 * line(g) + 0.0722 * line(b);
};
const ground = (element) => {
  const layers = [];
  for (let at = element; at; at = at.parentElement) {
    const colour = parts(getComputedStyle(at).backgroundColor);
    if (colour[3] > 0) layers.push(colour);
    if (colour[3] === 1) break;
  }
  return layers.reverse().reduce((below, layer) => over(layer, below), [255, 255, 255]);
};
const faint = [];
const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
for (let node = walker.nextNode(); node; node = walker.nextNode()) {
  const element = node.parentElement;
  const text = node.textContent.trim();
  if (!text || !element.checkVisibility({ visibilityProperty: true, opacityProperty: true })) continue;
  if (element.closest(".unseen, .skip, noscript, option, :disabled, [aria-disabled='true']")) continue;
  if (element.closest(".screen")?.querySelector(".preview")) continue; // it stands on a picture
  const style = getComputedStyle(element);
  const below = ground(element);
  const [a, b] = [light(over(parts(style.color), below)), light(below)].sort((x, y) => y - x);
  const ratio = (a + 0.05) / (b + 0.05);
  const large = parseFloat(style.fontSize) >= 24;
  if (ratio < (large ? 3 : 4.5)) faint.push([text.slice(0, 40), ratio.toFixed(2), style.color, below.join()]);
}
return faint;
