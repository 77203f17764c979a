/** A request to the server of the page. */

/** The response, if it is a good one. */
export async function asked(address: URL, settings: RequestInit = {}): Promise<Response> {
  const response = await fetch(address, { credentials: "omit", referrerPolicy: "no-referrer", ...settings });
  if (response.ok) return response;
  const told = (await response.json().catch(() => ({}))) as { error?: unknown };
  const name = address.pathname.split("/").pop();
  throw new Error(typeof told.error === "string" ? told.error : `${name}: status ${response.status}`);
}
