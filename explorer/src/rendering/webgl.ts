/** Rasters as float textures, coloured by the GPU through a table of 256 entries. */

import { type Colouring, DECADES, SCALES, table } from "../colour.ts";
import type { Raster } from "../raster.ts";
import type { Size } from "../types.ts";
import { Bounded, CHECK_SIDE, cut, type Hatch, HATCH_PERIOD, type Painter, type Quad, resize } from "./painter.ts";

const TEXTURE_BYTES = 48e6;

// Stand for NaN and infinity in textures, since shaders may treat these as they like.
const ABSENT = -1e30;
const BROKEN = 1e30;

const VERTEX = `#version 300 es
uniform vec4 target;
uniform vec2 size;
void main() {
  vec2 corner = vec2(gl_VertexID & 1, gl_VertexID >> 1);
  vec2 at = (target.xy + corner * target.zw) / size;
  gl_Position = vec4(2.0 * at.x - 1.0, 1.0 - 2.0 * at.y, 0.0, 1.0);
}`;

const FRAGMENT = `#version 300 es
precision highp float;
precision highp sampler2D;
uniform sampler2D weights;
uniform sampler2D colours;
uniform vec4 source;
uniform vec4 target;
uniform vec2 size;
uniform float maximum;
uniform int scale;
uniform bool isSigned;
uniform vec3 paper;
uniform vec3 line;
uniform vec3 broken;
uniform vec3 brokenPaper;
out vec4 colour;
void main() {
  vec2 pixel = vec2(gl_FragCoord.x, size.y - gl_FragCoord.y);
  vec2 cell = source.xy + (pixel - target.xy) / target.zw * source.zw;
  ivec2 held = clamp(ivec2(floor(cell)), ivec2(0), textureSize(weights, 0) - 1);
  float value = texelFetch(weights, held, 0).r;
  if (value < -1e29) {
    ivec2 whole = ivec2(floor(pixel));
    colour = vec4((whole.x + whole.y) % ${HATCH_PERIOD} == ${HATCH_PERIOD - 1} ? line : paper, 1.0);
    return;
  }
  if (value > 1e29) {
    ivec2 check = ivec2(floor(pixel)) / ${CHECK_SIDE};
    colour = vec4((check.x + check.y) % 2 == 1 ? brokenPaper : broken, 1.0);
    return;
  }
  float at = maximum > 0.0 ? min(abs(value) / maximum, 1.0) : 0.0;
  if (scale == 1) at = sqrt(at);
  if (scale == 2) at = at <= ${10 ** -DECADES} ? 0.0 : 1.0 + log(at) / ${(Math.LN10 * DECADES).toFixed(7)};
  float index = isSigned ? 127.5 + sign(value) * at * 127.5 : at * 255.0;
  colour = vec4(texelFetch(colours, ivec2(int(floor(index + 0.5)), 0), 0).rgb, 1.0);
}`;

export class WebGLPainter implements Painter {
  readonly name = "webgl";
  readonly canvas: HTMLCanvasElement;
  private readonly gl: WebGL2RenderingContext;
  private readonly program: WebGLProgram;
  private readonly textures: Bounded<WebGLTexture>;
  private readonly tables: Bounded<WebGLTexture>;

  /** Undefined where WebGL2 is missing, or is software that the 2D canvas outruns (unless `insist`). */
  static create(insist: boolean, lost: () => void): WebGLPainter | undefined {
    const canvas = document.createElement("canvas");
    const gl = canvas.getContext("webgl2", { antialias: false, depth: false, stencil: false, alpha: true });
    if (!gl) return undefined;
    const renderer = String(gl.getParameter(gl.RENDERER)) + rendererOf(gl);
    if (!insist && /swiftshader|llvmpipe|software|basic render/i.test(renderer)) {
      gl.getExtension("WEBGL_lose_context")?.loseContext();
      return undefined;
    }
    const program = compiled(gl);
    if (!program) return undefined;
    canvas.addEventListener("webglcontextlost", (event) => {
      event.preventDefault();
      lost();
    });
    return new WebGLPainter(canvas, gl, program);
  }

  private constructor(canvas: HTMLCanvasElement, gl: WebGL2RenderingContext, program: WebGLProgram) {
    this.canvas = canvas;
    this.gl = gl;
    this.program = program;
    this.textures = new Bounded<WebGLTexture>(TEXTURE_BYTES, (texture) => gl.deleteTexture(texture));
    this.tables = new Bounded<WebGLTexture>(8, (texture) => gl.deleteTexture(texture));
  }

  draw(size: Size, quads: Quad[], colouring: Omit<Colouring, "maximum">, hatch: Hatch): void {
    const { gl } = this;
    resize(this.canvas, size);
    gl.viewport(0, 0, size.width, size.height);
    gl.clearColor(0, 0, 0, 0);
    gl.clear(gl.COLOR_BUFFER_BIT);
    gl.useProgram(this.program);
    gl.uniform1i(this.at("colours"), 1);
    gl.uniform1i(this.at("weights"), 0);
    gl.uniform2f(this.at("size"), size.width, size.height);
    gl.uniform1i(this.at("scale"), SCALES.indexOf(colouring.scale));
    gl.uniform1i(this.at("isSigned"), colouring.signed ? 1 : 0);
    gl.uniform3fv(this.at("paper"), rgbOf(hatch.paper));
    gl.uniform3fv(this.at("line"), rgbOf(hatch.line));
    gl.uniform3fv(this.at("broken"), rgbOf(hatch.broken));
    gl.uniform3fv(this.at("brokenPaper"), rgbOf(hatch.brokenPaper));
    gl.activeTexture(gl.TEXTURE1);
    gl.bindTexture(gl.TEXTURE_2D, this.table(colouring));
    gl.activeTexture(gl.TEXTURE0);
    for (const whole of quads) {
      const quad = cut(whole, size);
      if (!quad) continue;
      const { source, target } = quad;
      gl.bindTexture(gl.TEXTURE_2D, this.texture(quad.raster));
      gl.uniform4f(this.at("source"), source.x, source.y, source.width, source.height);
      gl.uniform4f(this.at("target"), target.x, target.y, target.width, target.height);
      gl.uniform1f(this.at("maximum"), quad.maximum);
      gl.drawArrays(gl.TRIANGLE_STRIP, 0, 4);
    }
  }

  destroy(): void {
    this.textures.clear();
    this.tables.clear();
    this.gl.getExtension("WEBGL_lose_context")?.loseContext();
  }

  private readonly locations = new Map<string, WebGLUniformLocation | null>();

  private at(name: string): WebGLUniformLocation | null {
    if (!this.locations.has(name)) this.locations.set(name, this.gl.getUniformLocation(this.program, name));
    return this.locations.get(name) ?? null;
  }

  private texture(raster: Raster): WebGLTexture {
    return this.textures.get(raster.id, 4 * raster.data.length, () => {
      const { gl } = this;
      const values = raster.data.map((value) => {
        return value !== value ? ABSENT : Math.abs(value) === Infinity ? BROKEN : value;
      });
      return textureOf(gl, () =>
        gl.texImage2D(gl.TEXTURE_2D, 0, gl.R32F, raster.columns, raster.rows, 0, gl.RED, gl.FLOAT, values),
      );
    });
  }

  private table(colouring: Omit<Colouring, "maximum">): WebGLTexture {
    const entries = table(colouring.colours, colouring.signed);
    const name = colouring.signed ? "diverging" : colouring.colours;
    return this.tables.get(name, 1, () => {
      const { gl } = this;
      return textureOf(gl, () =>
        gl.texImage2D(gl.TEXTURE_2D, 0, gl.RGBA8, 256, 1, 0, gl.RGBA, gl.UNSIGNED_BYTE, entries),
      );
    });
  }
}

function textureOf(gl: WebGL2RenderingContext, fill: () => void): WebGLTexture {
  const texture = gl.createTexture() as WebGLTexture;
  gl.bindTexture(gl.TEXTURE_2D, texture);
  gl.pixelStorei(gl.UNPACK_ALIGNMENT, 1);
  fill();
  for (const name of [gl.TEXTURE_MIN_FILTER, gl.TEXTURE_MAG_FILTER]) gl.texParameteri(gl.TEXTURE_2D, name, gl.NEAREST);
  for (const name of [gl.TEXTURE_WRAP_S, gl.TEXTURE_WRAP_T]) gl.texParameteri(gl.TEXTURE_2D, name, gl.CLAMP_TO_EDGE);
  return texture;
}

function rendererOf(gl: WebGL2RenderingContext): string {
  const extension = gl.getExtension("WEBGL_debug_renderer_info");
  return extension ? ` ${String(gl.getParameter(extension.UNMASKED_RENDERER_WEBGL))}` : "";
}

function compiled(gl: WebGL2RenderingContext): WebGLProgram | undefined {
  const program = gl.createProgram() as WebGLProgram;
  for (const [kind, text] of [
    [gl.VERTEX_SHADER, VERTEX],
    [gl.FRAGMENT_SHADER, FRAGMENT],
  ] as const) {
    const shader = gl.createShader(kind) as WebGLShader;
    gl.shaderSource(shader, text);
    gl.compileShader(shader);
    gl.attachShader(program, shader);
  }
  gl.linkProgram(program);
  return gl.getProgramParameter(program, gl.LINK_STATUS) ? program : undefined;
}

/** "#rrggbb" as three numbers from 0 to 1. */
function rgbOf(colour: string): [number, number, number] {
  const value = Number.parseInt(colour.slice(1), 16);
  return [(value >> 16) / 255, ((value >> 8) & 255) / 255, (value & 255) / 255];
}
