/** Translates wheel, pinch, drag, double click and click into zoom, pan and tap events. */

export interface Gestures {
  zoom(factor: number, x: number, y: number): void;
  pan(dx: number, dy: number): void;
  tap(x: number, y: number, several: boolean): void;
  hover(x: number, y: number): void;
  leave(): void;
}

const TAP_DISTANCE = 4;
const WHEEL_SPEED = 0.0022;
const LINE = 32;

export function listen(element: HTMLElement, gestures: Gestures): void {
  const pointers = new Map<number, { x: number; y: number }>();
  let travelled = 0;

  const at = (event: MouseEvent) => {
    const box = element.getBoundingClientRect();
    return { x: event.clientX - box.left, y: event.clientY - box.top };
  };
  element.addEventListener(
    "wheel",
    (event) => {
      event.preventDefault();
      const { x, y } = at(event);
      const lines = event.deltaMode === WheelEvent.DOM_DELTA_PIXEL ? 1 : LINE;
      // A pinch on a touch pad comes as a wheel with Control, in small steps.
      const speed = event.ctrlKey ? 4 * WHEEL_SPEED : WHEEL_SPEED;
      gestures.zoom(Math.exp(-Math.max(-400, Math.min(400, event.deltaY * lines)) * speed), x, y);
    },
    { passive: false },
  );
  element.addEventListener("pointerdown", (event) => {
    if (event.button !== 0) return;
    element.setPointerCapture(event.pointerId);
    pointers.set(event.pointerId, at(event));
    travelled = 0;
  });
  element.addEventListener("pointermove", (event) => {
    const now = at(event);
    const before = pointers.get(event.pointerId);
    if (!before) return gestures.hover(now.x, now.y);
    pointers.set(event.pointerId, now);
    travelled += Math.hypot(now.x - before.x, now.y - before.y);
    const other = [...pointers].find(([id]) => id !== event.pointerId)?.[1];
    if (other) pinch(gestures, other, before, now);
    else if (travelled > TAP_DISTANCE) gestures.pan(now.x - before.x, now.y - before.y);
  });
  const up = (event: PointerEvent) => {
    const alone = pointers.size === 1;
    if (!pointers.delete(event.pointerId) || event.type !== "pointerup") return;
    const { x, y } = at(event);
    if (alone && travelled <= TAP_DISTANCE) gestures.tap(x, y, event.shiftKey);
  };
  element.addEventListener("pointerup", up);
  element.addEventListener("pointercancel", up);
  element.addEventListener("pointerleave", () => gestures.leave());
  element.addEventListener("dblclick", (event) => {
    const { x, y } = at(event);
    gestures.zoom(event.shiftKey ? 0.5 : 2, x, y);
  });
}

interface Point {
  x: number;
  y: number;
}

function pinch(gestures: Gestures, still: Point, before: Point, now: Point): void {
  const from = Math.hypot(before.x - still.x, before.y - still.y);
  const to = Math.hypot(now.x - still.x, now.y - still.y);
  gestures.pan((now.x - before.x) / 2, (now.y - before.y) / 2);
  if (from > 0) gestures.zoom(to / from, (now.x + still.x) / 2, (now.y + still.y) / 2);
}
