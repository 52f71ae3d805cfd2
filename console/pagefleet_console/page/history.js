// Conversations kept in this browser: bounded in number and size, the oldest go first. What is damaged is left out.

import { asArray, asObject, asText } from "./answer.js";

const INDEX = "pagefleet.chats";
const ONE = "pagefleet.chat.";
const MAX_CHATS = 200;
const MAX_SIZE = 4_000_000;
const ROLES = new Set(["user", "assistant", "tool"]);

/** @typedef {{id: string, title: string, updated: number, size: number}} Entry  size: characters */

/** The chats that a browser keeps for this address. */
export class History {
  #storage;

  /** @param {Storage} storage  localStorage; it may refuse */
  constructor(storage) {
    this.#storage = storage;
  }

  /** Newest first. @returns {Entry[]} */
  entries() {
    const entries = asArray(this.#read(INDEX)).map(asObject);
    return entries
      .filter((one) => asText(one.id) && Number.isFinite(one.updated))
      .sort((a, b) => b.updated - a.updated);
  }

  /** @returns {import("./tree.js").Conversation | null} */
  load(id) {
    return asConversation(this.#read(ONE + id));
  }

  /** Keep a conversation; the oldest make room if that helps. Returns whether it is kept; if not, nothing changes. */
  save(chat) {
    const text = JSON.stringify(chat);
    if (text.length > MAX_SIZE) return false;
    const entry = { id: chat.id, title: chat.title, updated: chat.updated, size: text.length };
    const others = this.entries().filter((one) => one.id !== chat.id);
    const kept = others.slice(0, fitting(others, MAX_SIZE - text.length));
    const before = new Map([[chat.id, this.#text(chat.id)]]);
    const makeRoom = ({ id }) => {
      before.set(id, this.#text(id));
      this.#drop(id);
    };
    for (const one of others.slice(kept.length)) makeRoom(one);
    for (;;) {
      try {
        this.#storage.setItem(ONE + chat.id, text);
        this.#storage.setItem(INDEX, JSON.stringify([entry, ...kept]));
        return true;
      } catch {
        // The browser gives less room than we ask for.
        if (!kept.length) break;
        makeRoom(kept.pop());
      }
    }
    this.#restore(before);
    return false;
  }

  remove(id) {
    this.#drop(id);
    this.#write(this.entries().filter((one) => one.id !== id));
  }

  clear() {
    for (const { id } of this.entries()) this.#drop(id);
    this.#write([]);
  }

  /** Return all of it, as a JSON document for people to keep. */
  exported() {
    const chats = this.entries()
      .map(({ id }) => this.load(id))
      .filter((chat) => chat !== null);
    return JSON.stringify({ exported: new Date().toISOString(), chats }, null, 2);
  }

  /** Put texts back, and list only what is there: another tab may have taken the room. */
  #restore(texts) {
    const lost = new Set();
    for (const [id, text] of texts) {
      try {
        this.#drop(id);
        if (text !== null) this.#storage.setItem(ONE + id, text);
      } catch {
        lost.add(id);
      }
    }
    if (lost.size) this.#write(this.entries().filter((one) => !lost.has(one.id)));
  }

  #text(id) {
    try {
      return this.#storage.getItem(ONE + id);
    } catch {
      return null;
    }
  }

  #read(name) {
    try {
      return JSON.parse(this.#storage.getItem(name) ?? "null");
    } catch {
      return null;
    }
  }

  #write(entries) {
    try {
      this.#storage.setItem(INDEX, JSON.stringify(entries));
    } catch {
      // A shorter list always has room where the longer one had; else nothing is kept at all.
    }
  }

  #drop(id) {
    try {
      this.#storage.removeItem(ONE + id);
    } catch {
      // As above.
    }
  }
}

/** Count how many of the newest chats fit beside one more into so many characters. */
function fitting(entries, room) {
  let count = 0;
  for (let left = room; count < Math.min(entries.length, MAX_CHATS - 1); count += 1) {
    left -= entries[count].size || 0;
    if (left < 0) break;
  }
  return count;
}

function asConversation(value) {
  const chat = asObject(value);
  const turns = asArray(chat.turns)
    .map(asObject)
    .filter((turn) => asText(turn.id) && ROLES.has(turn.role) && typeof turn.content === "string");
  if (!asText(chat.id) || !turns.length) return null;
  return {
    id: chat.id,
    title: asText(chat.title),
    updated: Number(chat.updated) || 0,
    turns: turns.map((turn) => ({ ...turn, parent: asText(turn.parent) || null })),
    chosen: asObject(chat.chosen),
    settings: asObject(chat.settings),
  };
}
