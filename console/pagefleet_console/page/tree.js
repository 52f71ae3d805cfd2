// A conversation is a tree of turns: what is edited or asked again becomes a sibling, and nothing is lost. No page here.

/**
 * @typedef {{data: string, name: string}} Picture  data: a data URL
 * @typedef {object} Turn
 * @property {string} id
 * @property {string | null} parent
 * @property {"user" | "assistant" | "tool"} role
 * @property {string} content
 * @property {Picture[]} [pictures]
 * @property {string} [reasoning]
 * @property {{id: string, name: string, arguments: string}[]} [calls]
 * @property {string} [call]  of a tool's turn: the id of the call that it answers
 * @property {string} [model]
 * @property {string | null} [finish]
 * @property {object | null} [error]  what ended it early: see remedies.js
 * @property {object} [figures]
 * @property {object} [path]  how it was routed
 *
 * @typedef {object} Conversation
 * @property {string} id
 * @property {string} title
 * @property {number} updated  milliseconds since 1970
 * @property {Turn[]} turns  in the order in which they were made
 * @property {Record<string, string>} chosen  by the id of a parent ("" for the first turns): the child that is shown
 * @property {object} settings
 */

const ROOT = "";

/** @returns {Conversation} */
export function newConversation(id, now, settings = {}) {
  return { id, title: "", updated: now, turns: [], chosen: {}, settings };
}

export const childrenOf = (chat, parent) => chat.turns.filter((turn) => turn.parent === parent);
export const turnOf = (chat, id) => chat.turns.find((turn) => turn.id === id);

/** Return the turns that are shown, from the first to the last. @returns {Turn[]} */
export function shownPath(chat) {
  const children = new Map();
  for (const turn of chat.turns) {
    const key = turn.parent ?? ROOT;
    if (!children.has(key)) children.set(key, []);
    children.get(key).push(turn);
  }
  const path = [];
  for (let here = ROOT; children.has(here); here = path.at(-1).id) {
    const siblings = children.get(here);
    path.push(siblings.find((turn) => turn.id === chat.chosen[here]) ?? siblings.at(-1));
    children.delete(here); // a damaged store may hold a circle
  }
  return path;
}

/** Put a turn below its parent, and show it. */
export function addTurn(chat, turn) {
  chat.turns.push(turn);
  chat.chosen[turn.parent ?? ROOT] = turn.id;
  if (!chat.title && turn.role === "user") chat.title = titleOf(turn.content);
  return turn;
}

/** Say where a turn stands among the other versions of it. @returns {{index: number, ids: string[]}} */
export function versionsOf(chat, turn) {
  const ids = childrenOf(chat, turn.parent).map((one) => one.id);
  return { index: ids.indexOf(turn.id), ids };
}

/** Show another version of a turn: `by` is +1 or -1. Returns the id of what is shown now. */
export function switchVersion(chat, turn, by) {
  const { index, ids } = versionsOf(chat, turn);
  const id = ids[Math.min(ids.length - 1, Math.max(0, index + by))];
  chat.chosen[turn.parent ?? ROOT] = id;
  return id;
}

/**
 * Return the messages of a request whose answer comes below `last`.
 * @param {Turn | null} last  null: below nothing
 */
export function messagesUpTo(chat, last, system) {
  const path = [];
  const known = new Map(chat.turns.map((turn) => [turn.id, turn]));
  for (let turn = last; turn && path.length <= chat.turns.length; turn = known.get(turn.parent)) path.unshift(turn);
  const messages = path.map(message).filter((one) => one !== null);
  return system.trim() ? [{ role: "system", content: system }, ...messages] : messages;
}

/** Return the calls of an answer that have no result yet below it on the shown path. */
export function openCalls(chat, turn) {
  const path = shownPath(chat);
  const below = path.slice(path.findIndex((one) => one.id === turn.id) + 1);
  const answered = new Set(below.filter((one) => one.role === "tool").map((one) => one.call));
  return (turn.calls ?? []).filter((call) => !answered.has(call.id));
}

/** @param {Turn} turn */
function message(turn) {
  if (turn.role === "tool") return { role: "tool", tool_call_id: turn.call, content: turn.content };
  if (turn.role === "assistant") {
    if (!turn.content && !turn.calls?.length) return null; // it broke before a word
    const calls = turn.calls?.map(({ id, name, arguments: given }) => ({
      id,
      type: "function",
      function: { name, arguments: given },
    }));
    return { role: "assistant", content: turn.content || null, ...(calls?.length ? { tool_calls: calls } : {}) };
  }
  if (!turn.pictures?.length) return { role: "user", content: turn.content };
  const pictures = turn.pictures.map(({ data }) => ({ type: "image_url", image_url: { url: data } }));
  return { role: "user", content: [{ type: "text", text: turn.content }, ...pictures] };
}

function titleOf(text) {
  const line = text.trim().split("\n", 1)[0];
  return line.length > 60 ? `${line.slice(0, 59).trimEnd()}…` : line || "Picture";
}
