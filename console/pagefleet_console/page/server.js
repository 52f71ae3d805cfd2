// What the page asks of the server it came from, and how the server's errors become words. The key goes in a header only.

import { asArray, asObject, asText } from "./answer.js";
import { trouble, unreachable } from "./remedies.js";
import { EventReader } from "./sse.js";

const KEY = "pagefleet.key";

/** An answer that is an error; `trouble` says what and what to do. */
export class ServerError extends Error {
  /** @param {import("./remedies.js").Trouble} fault */
  constructor(fault) {
    super(fault.what);
    this.trouble = fault;
  }

  get needsKey() {
    return this.trouble.status === 401;
  }

  get isLoading() {
    return this.trouble.code === "engine_loading";
  }
}

/**
 * @typedef {{id: string, length: number | null, pictures: boolean}} Model  length: tokens of its context
 * @typedef {{request: string | null, engine: string | null, weighed: Weighed[] | null}} Path  null: not told
 * @typedef {{engine: string, seconds: number, cached_tokens: number, queued_tokens: number, reason: string,
 *   prefill?: string}} Weighed
 */

/** The server, as one user with one key or none sees it. The key lives as long as the tab. */
export class Server {
  #storage;
  #etag = null;
  #state = null;

  /** @param {Storage} storage  sessionStorage */
  constructor(storage) {
    this.#storage = storage;
  }

  get key() {
    return this.#storage.getItem(KEY) ?? "";
  }

  set key(value) {
    if (value) this.#storage.setItem(KEY, value);
    else this.#storage.removeItem(KEY);
    this.#etag = null;
    this.#state = null;
  }

  /** @returns {Promise<Model[]>} */
  async models() {
    const body = asObject(await (await this.#ask("/v1/models")).json());
    return asArray(body.data)
      .map(asObject)
      .filter((one) => asText(one.id))
      .map((one) => ({
        id: one.id,
        length: Number.isInteger(one.max_model_len) ? one.max_model_len : null,
        pictures: asArray(one.input_modalities).includes("image"),
      }));
  }

  /** Return the document of /console/state; the same object while nothing changed. */
  async state() {
    const headers = this.#etag ? { "if-none-match": this.#etag } : {};
    const response = await this.#ask("/console/state", { headers });
    if (response.status === 304) return this.#state;
    this.#state = await response.json();
    this.#etag = response.headers.get("etag");
    return this.#state;
  }

  /**
   * Ask for an answer, and read it as it comes.
   * @param {object} body
   * @param {{signal: AbortSignal, onPath: (path: Path) => void, onEvent: (data: string) => void}} options
   */
  async chat(body, { signal, onPath, onEvent }) {
    const asking = { "content-type": "application/json", "x-pagefleet-explain": "1" };
    const request = { method: "POST", body: JSON.stringify(body), signal, headers: asking };
    const response = await this.#ask("/v1/chat/completions", request);
    const headers = new Headers(response.headers);
    onPath(pathOf(headers));
    // An answer that began before it had an engine says in a comment what the head of others says.
    const events = new EventReader((comment) => {
      const [, name, value] = /^(x-pagefleet-[a-z]+): (.*)$/.exec(comment) ?? [];
      if (!name || headers.has(name)) return;
      headers.set(name, value);
      onPath(pathOf(headers));
    });
    const reader = response.body.getReader();
    for (;;) {
      const { done, value } = await reader.read();
      for (const data of done ? events.end() : events.push(value)) onEvent(data);
      if (done) return;
    }
  }

  async #ask(path, options = {}) {
    const authorization = this.key ? { authorization: `Bearer ${this.key}` } : {};
    const headers = { ...options.headers, ...authorization };
    const settled = { cache: "no-store", credentials: "same-origin", redirect: "error", ...options, headers };
    let response;
    try {
      response = await fetch(path, settled);
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new ServerError(unreachable());
    }
    if (response.ok || response.status === 304) return response;
    throw new ServerError(await troubleOf(response));
  }
}

/** @returns {Path} */
function pathOf(headers) {
  let weighed = null;
  try {
    weighed = JSON.parse(headers.get("x-pagefleet-explain") ?? "null");
  } catch {
    // A proxy on the way cut the header: as if it had not been told.
  }
  return {
    request: headers.get("x-request-id"),
    engine: headers.get("x-pagefleet-engine"),
    weighed: Array.isArray(weighed) ? weighed.map(asObject).filter((one) => asText(one.engine)) : null,
  };
}

async function troubleOf(response) {
  const error = await response
    .json()
    .then((body) => asObject(asObject(body).error))
    .catch(() => ({}));
  const wait = Number.parseFloat(response.headers.get("retry-after") ?? "");
  return trouble(asText(error.message) || `The server answered ${response.status}.`, {
    code: asText(error.code) || null,
    status: response.status,
    wait: Number.isFinite(wait) ? wait : null,
    request: response.headers.get("x-request-id"),
  });
}
