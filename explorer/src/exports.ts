/** Export of views as PNG, SVG, CSV and NPZ files. */

import type { ViewPart } from "./context.ts";
import { drawShapes, FONT, type Picture, type Shape, TEXT_SIZE } from "./shapes.ts";

const PNG_RATIO = 2;

export function pngOf(picture: Picture, paper: string): Promise<Blob> {
  const canvas = document.createElement("canvas");
  canvas.width = Math.round(picture.width * PNG_RATIO);
  canvas.height = Math.round(picture.height * PNG_RATIO);
  const context = canvas.getContext("2d") as CanvasRenderingContext2D;
  context.fillStyle = paper;
  context.fillRect(0, 0, canvas.width, canvas.height);
  context.scale(PNG_RATIO, PNG_RATIO);
  drawShapes(context, picture.shapes);
  return new Promise((resolve, reject) => {
    canvas.toBlob(
      (blob) => (blob ? resolve(blob) : reject(new Error("the picture is too large for a PNG"))),
      "image/png",
    );
  });
}

/** Vector labels and lines over embedded rasters. */
export function svgOf(picture: Picture, paper: string): string {
  const { width, height } = picture;
  const clips: string[] = [];
  const body = picture.shapes.map((shape) => svgShape(shape, clips)).join("\n");
  return [
    `<svg xmlns="http://www.w3.org/2000/svg" width="${width}" height="${height}" viewBox="0 0 ${width} ${height}"` +
      ` font-family="${escaped(FONT)}" font-size="${TEXT_SIZE}">`,
    `<title>${escaped(picture.title)}</title>`,
    clips.length ? `<defs>${clips.join("")}</defs>` : "",
    `<rect width="100%" height="100%" fill="${paper}"/>`,
    body,
    "</svg>",
  ].join("\n");
}

const round = (value: number): string => String(Math.round(value * 100) / 100);

function place(box: { x: number; y: number; width: number; height: number }): string {
  return `x="${round(box.x)}" y="${round(box.y)}" width="${round(box.width)}" height="${round(box.height)}"`;
}

function svgShape(shape: Shape, clips: string[]): string {
  if (shape.kind === "text") return svgText(shape);
  if (shape.kind === "box") {
    const stroke = shape.stroke ? ` stroke="${shape.stroke}" stroke-width="${shape.line ?? 1}"` : "";
    return `<rect ${place(shape)} fill="${shape.fill ?? "none"}"${stroke}${opacity(shape.opacity)}/>`;
  }
  if (shape.kind === "path") {
    const points: string[] = [];
    for (let i = 0; i < shape.points.length; i += 2)
      points.push(`${round(shape.points[i])},${round(shape.points[i + 1])}`);
    const stroke = shape.stroke ? ` stroke="${shape.stroke}" stroke-width="${shape.width ?? 1}"` : "";
    const dash = shape.dash ? ` stroke-dasharray="${shape.dash.join(" ")}"` : "";
    const line = `${stroke}${dash}${opacity(shape.opacity)}`;
    return `<polyline points="${points.join(" ")}" fill="${shape.fill ?? "none"}"${line}/>`;
  }
  if (shape.kind === "curve") {
    const [x0, y0, x1, y1] = [...shape.from, ...shape.to].map(round);
    const middle = round((shape.from[0] + shape.to[0]) / 2);
    return (
      `<path d="M${x0} ${y0}C${middle} ${y0} ${middle} ${y1} ${x1} ${y1}" fill="none" stroke="${shape.stroke}"` +
      ` stroke-width="${round(shape.width)}" stroke-linecap="${shape.dash ? "butt" : "round"}"` +
      `${shape.dash ? ` stroke-dasharray="${shape.dash.join(" ")}"` : ""}${opacity(shape.opacity)}/>`
    );
  }
  if (shape.kind === "image") {
    const data = shape.image.toDataURL("image/png");
    return `<image ${place(shape)} preserveAspectRatio="none" image-rendering="pixelated" href="${data}"/>`;
  }
  return svgGroup(shape, clips);
}

function svgGroup(shape: Extract<Shape, { kind: "group" }>, clips: string[]): string {
  let clip = "";
  if (shape.clip) {
    const id = `clip${clips.length}`;
    clips.push(`<clipPath id="${id}"><rect ${place(shape.clip)}/></clipPath>`);
    clip = ` clip-path="url(#${id})"`;
  }
  const inside = shape.shapes.map((inner) => svgShape(inner, clips)).join("\n");
  return `<g transform="translate(${round(shape.x)} ${round(shape.y)})"${clip}>\n${inside}\n</g>`;
}

function svgText(shape: Extract<Shape, { kind: "text" }>): string {
  const turn = shape.turn ? ` transform="rotate(-90 ${round(shape.x)} ${round(shape.y)})"` : "";
  const size = shape.size ? ` font-size="${shape.size}"` : "";
  const bold = shape.bold ? ' font-weight="600"' : "";
  return (
    `<text x="${round(shape.x)}" y="${round(shape.y)}" dominant-baseline="central" fill="${shape.colour}"` +
    ` text-anchor="${shape.anchor ?? "start"}"${size}${bold}${turn}>${escaped(shape.text)}</text>`
  );
}

function opacity(value: number | undefined): string {
  return value === undefined || value === 1 ? "" : ` opacity="${round(value)}"`;
}

/** Text for XML: its five characters escaped, what XML forbids left out. */
export function escaped(text: string): string {
  const names: Record<string, string> = { "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;", "'": "&apos;" };
  return text
    .replace(/[\u0000-\u0008\u000b\u000c\u000e-\u001f\ufffe\uffff]/g, "")
    .toWellFormed()
    .replace(/[&<>"']/g, (character) => names[character]);
}

/** Lines of comma-separated values; every text in quotes, as RFC 4180 has it. */
export function csvOf(rows: (string | number)[][]): string {
  const cell = (value: string | number) => {
    // A pair that does not exist is left empty; a weight that is not a number comes as infinity.
    if (typeof value === "number") return Number.isNaN(value) ? "" : Number.isFinite(value) ? String(value) : "NaN";
    // A spreadsheet takes what begins like a formula for one.
    const safe = /^[=+\-@\t\r]/.test(value) ? `'${value}` : value;
    return `"${safe.replace(/"/g, '""')}"`;
  };
  return rows.map((row) => row.map(cell).join(",")).join("\r\n");
}

/** Hands a file to the browser to be saved. */
export function save(blob: Blob, name: string): void {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = name.replace(/[^\w.-]+/g, "-").slice(0, 120);
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

export type Kind = "png" | "svg" | "csv" | "npz";

/** Saves what a view shows, if it can be told in that kind of file. */
export async function saveView(view: ViewPart, kind: Kind, name: string, paper: string): Promise<void> {
  if (kind === "png" || kind === "svg") await view.prepare?.();
  if (kind === "csv" && view.csv) save(new Blob([await view.csv()], { type: "text/csv" }), name);
  else if (kind === "npz" && view.npz) save(new Blob([await view.npz()], { type: "application/zip" }), name);
  else if (view.picture && kind === "svg")
    save(new Blob([svgOf(view.picture(), paper)], { type: "image/svg+xml" }), name);
  else if (view.picture && kind === "png") save(await pngOf(view.picture(), paper), name);
}
