// Reordering a list by its grips: dragged with mouse or finger, or moved with the arrow keys.

const STEPS = { ArrowUp: -1, ArrowLeft: -1, ArrowDown: 1, ArrowRight: 1, Home: -Infinity, End: Infinity };

/** `move(from, to)` changes the order and draws the list anew; it returns whether there was anything to move. */
export function sortable(list, move) {
  let held = null; // place of the item being dragged
  let pointer = null;

  const placeOf = (element) => [...list.children].indexOf(element?.closest("li"));
  const gripAt = (place) => list.children[place]?.querySelector(".grip");

  list.addEventListener("keydown", (event) => {
    if (!event.target.matches(".grip") || !(event.key in STEPS)) return;
    event.preventDefault();
    const from = placeOf(event.target);
    const to = Math.min(Math.max(from + STEPS[event.key], 0), list.children.length - 1);
    if (move(from, to)) gripAt(to)?.focus();
  });

  list.addEventListener("pointerdown", (event) => {
    const grip = event.target.closest(".grip");
    if (!grip || event.button !== 0) return;
    event.preventDefault(); // no selection of text
    grip.focus();
    [held, pointer] = [placeOf(grip), event.pointerId];
    list.children[held].classList.add("held");
    list.setPointerCapture(pointer); // the list stays when its rows are drawn anew
  });

  list.addEventListener("pointermove", (event) => {
    if (held === null || event.pointerId !== pointer) return;
    const to = [...list.children].findIndex((row) => {
      const box = row.getBoundingClientRect();
      return event.clientY >= box.top && event.clientY < box.bottom;
    });
    if (to < 0 || to === held) return;
    if (move(held, to)) {
      held = to;
      list.children[held].classList.add("held");
    }
  });

  const end = () => {
    if (held === null) return;
    list.children[held]?.classList.remove("held");
    held = pointer = null;
  };
  list.addEventListener("pointerup", end);
  list.addEventListener("pointercancel", end);
}
