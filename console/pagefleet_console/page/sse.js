// Server-sent events, from the bytes of a response as they come. However the bytes are cut, the events are the same.

const MAX_EVENT = 16 * 1024 * 1024;

/** Reads events out of bytes: `push` each piece, then `end`. */
export class EventReader {
  #decoder = new TextDecoder("utf-8", { fatal: false });
  #line = "";
  #data = [];
  #size = 0;
  #sawReturn = false;
  #onComment;

  /** @param {(text: string) => void} onComment  gets each comment as it comes */
  constructor(onComment = () => {}) {
    this.#onComment = onComment;
  }

  /**
   * Take the next bytes.
   * @param {Uint8Array} bytes
   * @returns {string[]} the data of each event that they complete
   */
  push(bytes) {
    return this.#read(this.#decoder.decode(bytes, { stream: true }));
  }

  /** The bytes are over. An event without its empty line is none: the rule of the standard, and how a break is seen. */
  end() {
    const events = this.#read(this.#decoder.decode());
    this.#line = "";
    this.#data = [];
    return events;
  }

  #read(text) {
    const events = [];
    let start = 0;
    // A return at the end of one piece and a feed at the start of the next are one end of line.
    if (this.#sawReturn && text.startsWith("\n")) start = 1;
    if (text) this.#sawReturn = false;
    const ends = /\r\n|\r|\n/g;
    ends.lastIndex = start;
    for (let found = ends.exec(text); found; found = ends.exec(text)) {
      this.#take(this.#line + text.slice(start, found.index), events);
      this.#line = "";
      start = ends.lastIndex;
      this.#sawReturn = found[0] === "\r" && start === text.length;
    }
    this.#line += text.slice(start);
    if (this.#line.length + this.#size > MAX_EVENT) throw new RangeError("One event of the stream is over 16 MB.");
    return events;
  }

  #take(line, events) {
    if (line === "") {
      if (this.#data.length) events.push(this.#data.join("\n"));
      this.#data = [];
      this.#size = 0;
      return;
    }
    const colon = line.indexOf(":");
    if (colon === 0) return this.#onComment(line.slice(1).trim());
    const field = colon < 0 ? line : line.slice(0, colon);
    if (field !== "data") return; // names, ids and retries: chat streams have none
    const value = colon < 0 ? "" : line.slice(line[colon + 1] === " " ? colon + 2 : colon + 1);
    this.#data.push(value);
    this.#size += value.length;
  }
}
