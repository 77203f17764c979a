/** Decodes typed arrays that are embedded in a page as base64 text. */

/** `type` f4, f2 or u1 (value × scale; 255 = no pair), little-endian, base64, through gzip where `gzip` is true. */
export interface WrittenArray {
  type: "f4" | "f2" | "u1";
  data: string;
  scale?: number;
  gzip?: boolean;
}

export async function floats(written: WrittenArray): Promise<Float32Array> {
  let bytes = unpacked(written.data);
  if (written.gzip) bytes = await inflated(bytes);
  if (written.type === "f4") return new Float32Array(bytes.buffer);
  if (written.type === "f2") return halves(new Uint16Array(bytes.buffer));
  const scale = written.scale ?? 1;
  return Float32Array.from(bytes, (byte) => (byte === 255 ? NaN : byte * scale));
}

function unpacked(text: string): Uint8Array<ArrayBuffer> {
  const characters = atob(text);
  const bytes = new Uint8Array(characters.length);
  for (let i = 0; i < bytes.length; i += 1) bytes[i] = characters.charCodeAt(i);
  return bytes;
}

async function inflated(bytes: Uint8Array<ArrayBuffer>): Promise<Uint8Array<ArrayBuffer>> {
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

/** Text that is embedded as base64, through gzip. */
export async function inflatedText(data: string): Promise<string> {
  return new TextDecoder().decode(await inflated(unpacked(data)));
}

/** IEEE 754 binary16. */
function halves(bits: Uint16Array): Float32Array {
  const result = new Float32Array(bits.length);
  for (let i = 0; i < bits.length; i += 1) {
    const sign = bits[i] & 0x8000 ? -1 : 1;
    const exponent = (bits[i] >> 10) & 0x1f;
    const fraction = bits[i] & 0x3ff;
    if (exponent === 31) result[i] = fraction ? NaN : sign * Infinity;
    else if (exponent === 0) result[i] = sign * fraction * 2 ** -24;
    else result[i] = sign * (1 + fraction / 1024) * 2 ** (exponent - 15);
  }
  return result;
}
