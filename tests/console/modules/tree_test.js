import {
  addTurn,
  messagesUpTo,
  newConversation,
  openCalls,
  shownPath,
  switchVersion,
  turnOf,
  versionsOf,
} from "/console/tree.js";
import { equal } from "./check.js";

function talk() {
  const chat = newConversation("c", 0);
  addTurn(chat, { id: "q1", parent: null, role: "user", content: "first\nline" });
  addTurn(chat, { id: "a1", parent: "q1", role: "assistant", content: "one" });
  addTurn(chat, { id: "q2", parent: "a1", role: "user", content: "second" });
  return chat;
}
const ids = (chat) => shownPath(chat).map((turn) => turn.id);

export function what_is_edited_becomes_a_sibling() {
  const chat = talk();
  addTurn(chat, { id: "q1b", parent: null, role: "user", content: "other" });
  equal(ids(chat), ["q1b"]);
  equal(versionsOf(chat, turnOf(chat, "q1b")), { index: 1, ids: ["q1", "q1b"] });
  equal(switchVersion(chat, turnOf(chat, "q1b"), -1), "q1");
  equal(ids(chat), ["q1", "a1", "q2"]);
  equal(switchVersion(chat, turnOf(chat, "q1"), -1), "q1", "there is none before the first");
  equal(chat.title, "first");
}

export function messages_are_those_of_one_branch() {
  const chat = talk();
  addTurn(chat, { id: "a1b", parent: "q1", role: "assistant", content: "another" });
  equal(
    messagesUpTo(chat, turnOf(chat, "q2"), " Be brief. ").map((one) => one.content),
    [" Be brief. ", "first\nline", "one", "second"],
  );
  equal(messagesUpTo(chat, null, ""), []);
}

export function an_answer_that_broke_before_a_word_is_left_out() {
  const chat = talk();
  addTurn(chat, { id: "a2", parent: "q2", role: "assistant", content: "" });
  equal(messagesUpTo(chat, turnOf(chat, "a2"), "").length, 3);
}

export function calls_wait_for_their_results() {
  const chat = talk();
  const calls = [
    { id: "x", name: "f", arguments: "{}" },
    { id: "y", name: "g", arguments: "{}" },
  ];
  const turn = addTurn(chat, { id: "a2", parent: "q2", role: "assistant", content: "", calls });
  equal(
    openCalls(chat, turn).map((call) => call.id),
    ["x", "y"],
  );
  addTurn(chat, { id: "t", parent: "a2", role: "tool", call: "x", content: "1" });
  equal(
    openCalls(chat, turn).map((call) => call.id),
    ["y"],
  );
  equal(messagesUpTo(chat, turnOf(chat, "t"), "").at(-1), { role: "tool", tool_call_id: "x", content: "1" });
}

export function a_circle_in_a_damaged_store_ends() {
  const chat = {
    ...newConversation("c", 0),
    turns: [
      { id: "a", parent: null, role: "user", content: "" },
      { id: "b", parent: "b", role: "user", content: "" },
    ],
  };
  equal(ids(chat), ["a"]);
  equal(messagesUpTo(chat, chat.turns[1], "").length <= 3, true);
}
