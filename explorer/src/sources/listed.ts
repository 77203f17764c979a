/** The list of atlases that a server or a notebook offers. */

import { whole } from "../text.ts";

export interface Listed {
  atlases: { number: number; name: string }[];
  /** How many bytes a text may have that a model is run on; 0 where none can be run. */
  rerun: number;
}

/** Says before it is sent that a text is too long. */
export function checkLength(text: string, most: number): void {
  const bytes = new TextEncoder().encode(text).length;
  if (bytes > most) throw new Error(`the text has ${whole(bytes)} bytes; at most ${whole(most)} are read`);
}
