/**
 * Arrays as NumPy's `load` reads them: an uncompressed zip (PKWARE's APPNOTE 6.3, sections 4.3.7, 4.3.12 and 4.3.16) of
 * files in NumPy's own format (its NEP 1, version 1.0). Nothing in it needs pickle.
 */

export type NumberArray = { shape: number[]; data: Float32Array | Int32Array };

/** A list of texts becomes an array of Unicode; longer ones are cut. */
export const MOST_LETTERS = 200;

export function npzOf(arrays: Record<string, NumberArray | string[]>): Uint8Array<ArrayBuffer> {
  return zipped(Object.entries(arrays).map(([name, array]) => [`${name}.npy`, npyOf(array)]));
}

function npyOf(array: NumberArray | string[]): Uint8Array {
  if (!Array.isArray(array)) {
    const { data, shape } = array;
    return npy(data instanceof Float32Array ? "<f4" : "<i4", shape, data);
  }
  const texts = array.map((text) => [...text.toWellFormed()].slice(0, MOST_LETTERS));
  const width = Math.max(1, ...texts.map((letters) => letters.length));
  const letters = new Uint32Array(texts.length * width);
  texts.forEach((text, at) => {
    text.forEach((letter, l) => {
      letters[at * width + l] = letter.codePointAt(0) ?? 0;
    });
  });
  return npy(`<U${width}`, [texts.length], letters);
}

function npy(type: string, shape: number[], data: Float32Array | Int32Array | Uint32Array): Uint8Array {
  const said = `{'descr': '${type}', 'fortran_order': False, 'shape': (${shape.join(", ")}${shape.length === 1 ? "," : ""}), }`;
  const length = Math.ceil((10 + said.length + 1) / 64) * 64; // the data begin at a multiple of 64
  const header = `\x93NUMPY\x01\x00${String.fromCharCode((length - 10) & 255, (length - 10) >> 8)}${said.padEnd(length - 11)}\n`;
  const bytes = new Uint8Array(length + 4 * data.length);
  for (let i = 0; i < length; i += 1) bytes[i] = header.charCodeAt(i);
  const view = new DataView(bytes.buffer, length);
  data.forEach((value, i) => {
    if (data instanceof Float32Array) view.setFloat32(4 * i, value, true);
    else view.setUint32(4 * i, value, true);
  });
  return bytes;
}

const DATE = 0x21; // 1 January 1980: the files are of no time

function zipped(files: [name: string, content: Uint8Array][]): Uint8Array<ArrayBuffer> {
  const parts: Uint8Array[] = [];
  const entries: Uint8Array[] = [];
  let offset = 0;
  for (const [name, content] of files) {
    const letters = new TextEncoder().encode(name);
    // Version 2.0, no flags, stored, time, date, checksum, sizes, lengths of the name and of nothing more.
    const told = [u16(20, 0, 0, 0, DATE), u32(crc(content), content.length, content.length), u16(letters.length, 0)];
    const local = joined([u32(0x04034b50), ...told, letters, content]);
    // Written by version 2.0; no comment, disk 0, no attributes, and where the local part begins.
    entries.push(joined([u32(0x02014b50), u16(20), ...told, u16(0, 0, 0), u32(0, offset), letters]));
    parts.push(local);
    offset += local.length;
  }
  const central = joined(entries);
  const count = files.length;
  return joined([...parts, central, u32(0x06054b50), u16(0, 0, count, count), u32(central.length, offset), u16(0)]);
}

function u16(...numbers: number[]): Uint8Array {
  return Uint8Array.from(numbers.flatMap((number) => [number & 255, (number >>> 8) & 255]));
}

function u32(...numbers: number[]): Uint8Array {
  return joined(numbers.map((number) => u16(number & 0xffff, number >>> 16)));
}

function joined(parts: Uint8Array[]): Uint8Array<ArrayBuffer> {
  const bytes = new Uint8Array(parts.reduce((sum, part) => sum + part.length, 0));
  let at = 0;
  for (const part of parts) {
    bytes.set(part, at);
    at += part.length;
  }
  return bytes;
}

const CRC = Uint32Array.from({ length: 256 }, (_, byte) => {
  let value = byte;
  for (let bit = 0; bit < 8; bit += 1) value = value & 1 ? (value >>> 1) ^ 0xedb88320 : value >>> 1;
  return value;
});

/** The checksum of a zip, CRC-32. */
function crc(bytes: Uint8Array): number {
  let value = 0xffffffff;
  for (const byte of bytes) value = CRC[(value ^ byte) & 255] ^ (value >>> 8);
  return ~value >>> 0;
}
