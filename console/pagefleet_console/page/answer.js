// One answer as it comes: the deltas of a chat stream put together, and the times between them. No page, no network.

/**
 * @typedef {{id: string, name: string, arguments: string}} Call
 * @typedef {{firstToken: number | null, seconds: number, thought: number | null, tokens: number | null,
 *   prompt: number | null, cached: number | null, rate: number | null}} Figures  seconds; null: not known
 */

/** A spell in seconds below which a rate says nothing: its tokens came in one piece. */
const SHORTEST = 0.05;

/** Puts a stream together. Times are milliseconds of any one clock; `sentAt` is when the request was sent. */
export class Answer {
  content = "";
  reasoning = "";
  /** @type {Call[]} */
  calls = [];
  /** @type {string | null} */
  finish = null;
  model = "";
  done = false;
  /** What the stream's last event says went wrong. @type {{message: string, code: string | null} | null} */
  error = null;
  #sentAt;
  #first = null;
  #last = null;
  #thoughtEnd = null;
  #usage = null;

  constructor(sentAt) {
    this.#sentAt = sentAt;
  }

  /**
   * Take the data of one event.
   * @param {string} data
   * @param {number} now
   */
  take(data, now) {
    if (data === "[DONE]") {
      this.done = true;
      return;
    }
    const event = readObject(data);
    if (event.error) {
      const { message, code } = asObject(event.error);
      this.error = {
        message: asText(message) || "The server ended the stream with an error.",
        code: asText(code) || null,
      };
      return;
    }
    if (event.usage) this.#usage = asObject(event.usage);
    this.model = asText(event.model) || this.model;
    const choice = asObject(asArray(event.choices)[0]);
    if (this.#takeDelta(asObject(choice.delta), now)) {
      this.#first ??= now;
      this.#last = now;
    }
    this.finish = asText(choice.finish_reason) || this.finish;
  }

  #takeDelta(delta, now) {
    const thought = asText(delta.reasoning_content) || asText(delta.reasoning);
    const text = asText(delta.content) + asText(delta.refusal);
    const calls = asArray(delta.tool_calls);
    this.reasoning += thought;
    this.content += text;
    for (const one of calls) this.#takeCall(asObject(one));
    if (this.reasoning && this.#thoughtEnd === null && (text || calls.length)) this.#thoughtEnd = now;
    return Boolean(thought || text || calls.length);
  }

  #takeCall(part) {
    const index = Number.isInteger(part.index) && part.index >= 0 && part.index < 128 ? part.index : this.calls.length;
    while (this.calls.length <= index) this.calls.push({ id: "", name: "", arguments: "" });
    const call = this.calls[index];
    const called = asObject(part.function);
    call.id = asText(part.id) || call.id;
    call.name += asText(called.name);
    call.arguments += asText(called.arguments);
  }

  /** @returns {Figures} as far as they are known now */
  figures() {
    const seconds = (from, to) => (from === null || to === null ? null : Math.max(0, to - from) / 1000);
    const tokens = asCount(this.#usage?.completion_tokens);
    const spell = seconds(this.#first, this.#last);
    return {
      firstToken: seconds(this.#sentAt, this.#first),
      seconds: seconds(this.#sentAt, this.#last) ?? 0,
      thought: this.reasoning ? seconds(this.#first, this.#thoughtEnd ?? this.#last) : null,
      tokens,
      prompt: asCount(this.#usage?.prompt_tokens),
      cached: asCount(asObject(this.#usage?.prompt_tokens_details).cached_tokens),
      rate: tokens !== null && tokens > 1 && spell >= SHORTEST ? (tokens - 1) / spell : null,
    };
  }
}

/** Read JSON that has to be an object; raises SyntaxError where it is not. */
export function readObject(text) {
  const value = JSON.parse(text);
  if (typeof value !== "object" || value === null || Array.isArray(value)) throw new SyntaxError("expected an object");
  return value;
}

export const asObject = (value) => (typeof value === "object" && value !== null && !Array.isArray(value) ? value : {});
export const asArray = (value) => (Array.isArray(value) ? value : []);
export const asText = (value) => (typeof value === "string" ? value : "");
const asCount = (value) => (Number.isInteger(value) && value >= 0 ? value : null);
