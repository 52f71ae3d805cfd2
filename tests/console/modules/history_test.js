import { History } from "/console/history.js";
import { equal } from "./check.js";

/** A browser's storage that has room for so many characters, names and values together. */
class Storage {
  #kept = new Map();

  constructor(room = Infinity) {
    this.room = room;
  }

  get used() {
    return [...this.#kept].reduce((sum, [name, value]) => sum + name.length + value.length, 0);
  }

  get names() {
    return [...this.#kept.keys()].sort();
  }

  getItem(name) {
    return this.#kept.get(name) ?? null;
  }

  setItem(name, value) {
    const before = this.#kept.has(name) ? name.length + this.#kept.get(name).length : 0;
    if (this.used - before + name.length + value.length > this.room) throw new DOMException("", "QuotaExceededError");
    this.#kept.set(name, value);
  }

  removeItem(name) {
    this.#kept.delete(name);
  }
}

/** A conversation whose JSON has at least so many characters. */
const chat = (id, updated, size = 100) => ({
  id,
  title: id,
  updated,
  turns: [{ id: "t", parent: null, role: "user", content: "x".repeat(size) }],
  chosen: {},
  settings: {},
});
const listed = (history) => history.entries().map(({ id }) => id);

function assertKept(history, storage, ids) {
  equal(listed(history), ids);
  for (const id of ids) equal(history.load(id)?.id, id);
  equal(storage.names, [...ids.map((id) => `pagefleet.chat.${id}`), "pagefleet.chats"].sort());
}

export function a_chat_over_the_limit_costs_no_other() {
  const storage = new Storage();
  const history = new History(storage);
  equal([history.save(chat("a", 1)), history.save(chat("bb", 2))], [true, true]);
  equal(history.save(chat("c", 3, 4_000_001)), false);
  assertKept(history, storage, ["bb", "a"]);
}

export function a_chat_that_has_grown_over_the_limit_stays_as_it_was() {
  const storage = new Storage();
  const history = new History(storage);
  history.save(chat("a", 1));
  equal(history.save(chat("a", 2, 4_000_001)), false);
  equal(history.load("a").updated, 1);
  assertKept(history, storage, ["a"]);
}

export function the_oldest_make_room_below_the_limit() {
  const storage = new Storage();
  const history = new History(storage);
  for (let number = 1; number <= 3; number += 1) history.save(chat(`${number}`, number, 1_000_000));
  equal(history.save(chat("new", 4, 2_500_000)), true);
  assertKept(history, storage, ["new", "3"]);
}

export function a_quota_too_small_for_the_new_one_alone_loses_nothing() {
  const storage = new Storage();
  const history = new History(storage);
  for (const [id, updated] of [["a", 1], ["bb", 2], ["c", 3]]) history.save(chat(id, updated));
  storage.room = storage.used + 50;
  const before = storage.used;
  equal(history.save(chat("large", 4, storage.room)), false);
  equal(history.save(chat("bb", 5, storage.room)), false);
  equal(storage.used, before);
  assertKept(history, storage, ["c", "bb", "a"]);
}

export function a_quota_too_small_for_the_index_loses_nothing() {
  const storage = new Storage();
  const history = new History(storage);
  for (const [id, updated] of [["a", 1], ["bb", 2]]) history.save(chat(id, updated));
  const large = { ...chat("large", 3, 0), title: "t".repeat(500) };
  const rest = "pagefleet.chat.large".length + JSON.stringify(large).length + "pagefleet.chats".length;
  storage.room = storage.used + 1000;
  large.turns[0].content = "x".repeat(storage.room - rest - storage.getItem("pagefleet.chats").length);
  equal(history.save(large), false);
  assertKept(history, storage, ["bb", "a"]);
}

export function a_quota_takes_the_oldest_and_no_more() {
  const storage = new Storage();
  const history = new History(storage);
  for (const [id, updated] of [["a", 1], ["bb", 2], ["c", 3]]) history.save(chat(id, updated, 1000));
  storage.room = storage.used + 50;
  equal(history.save(chat("d", 4, 1000)), true);
  assertKept(history, storage, ["d", "c", "bb"]);
}
