import { Answer } from "/console/answer.js";
import { fleetHealth, fleetSum } from "/console/fleet_sum.js";
import { bytes, count, percent, seconds } from "/console/format.js";
import { highlight } from "/console/highlight.js";
import { History } from "/console/history.js";
import { LENGTH, Series, sparkPath } from "/console/series.js";
import { requestFields } from "/console/settings.js";
import { equal } from "./check.js";

export function figures_in_words() {
  equal([0, 7, 999, 1000, 1234567, 999_950, null].map(count), ["0", "7", "999", "1.00 k", "1.23 M", "1.00 M", "–"]);
  equal([0, 1023, 1536, 3.1e8].map(bytes), ["0 B", "1023 B", "1.50 KiB", "296 MiB"]);
  equal([0, 0.0032, 0.18, 12.34, 250, 7300, null].map(seconds), [
    "0 s",
    "3.20 ms",
    "0.18 s",
    "12.3 s",
    "4 min 10 s",
    "2 h 1 min",
    "–",
  ]);
  equal([0.004, 0.416, 1, null].map(percent), ["0 %", "42 %", "100 %", "–"]);
}

export function what_no_engine_tells_is_not_known() {
  const silent = { phase: "loading", running: null, ttft: null, revision: null };
  const told = {
    phase: "ready",
    running: 3,
    ttft: { p50: 1, p95: 2 },
    revision: "a",
    prefix_hit_ratio: 0.5,
    prompt_tokens_s: 10,
  };
  equal(fleetSum([silent]).running, null);
  equal(fleetSum([silent, told]).running, 3);
  equal(fleetSum([told, { ...told, prefix_hit_ratio: 1, prompt_tokens_s: 30 }]).hits, 0.875);
  equal(fleetHealth(fleetSum([silent, told])), { tone: "part", text: "1 of 2 ready" });
  equal(fleetHealth(fleetSum([])).tone, "none");
}

export function an_answer_is_put_together_and_timed() {
  const answer = new Answer(1000);
  const event = (delta, more = {}) => JSON.stringify({ model: "m", choices: [{ delta, ...more }] });
  answer.take(event({ role: "assistant", content: "" }), 1100);
  answer.take(event({ reasoning_content: "hm" }), 1200);
  answer.take(event({ content: "a" }), 1400);
  answer.take(event({ tool_calls: [{ index: 0, id: "x", function: { name: "f", arguments: "{" } }] }), 1500);
  answer.take(
    event({ tool_calls: [{ index: 0, function: { arguments: "}" } }] }, { finish_reason: "tool_calls" }),
    2200,
  );
  answer.take(JSON.stringify({ choices: [], usage: { completion_tokens: 11, prompt_tokens: 5 } }), 2300);
  answer.take("[DONE]", 2300);
  equal(answer.calls, [{ id: "x", name: "f", arguments: "{}" }]);
  equal([answer.content, answer.reasoning, answer.finish, answer.done], ["a", "hm", "tool_calls", true]);
  const { firstToken, thought, rate, tokens } = answer.figures();
  equal([firstToken, thought, rate, tokens], [0.2, 0.2, 10, 11]);
}

export function a_rate_of_one_piece_is_none() {
  const answer = new Answer(0);
  answer.take(JSON.stringify({ choices: [{ delta: { content: "abc" } }], usage: { completion_tokens: 9 } }), 100);
  equal(answer.figures().rate, null);
}

export function colours_lose_no_character() {
  const code = 'def f(x):  # note\n    return \'a\\\'b\' + """c\nd""" + 0x1F\n<b class=\'x\'>\n-- 1 /* */ `q`';
  for (const language of ["python", "js", "rust", "bash", "html", "sql", "json", "diff", "unknown", "__proto__"]) {
    equal(
      highlight(code, language)
        .map(([, text]) => text)
        .join(""),
      code,
      language,
    );
  }
  equal(highlight("return 1", "python"), [
    ["word", "return"],
    ["", " "],
    ["number", "1"],
  ]);
}

export function series_are_short_and_have_gaps() {
  const series = new Series();
  for (let value = 0; value < 200; value += 1) series.push(new Map([["a", value % 2 ? value : null]]));
  equal(series.of("a").length, LENGTH);
  equal(sparkPath([1, null, 2], 89, 10), "M87.0 5.0M89.0 1.0");
  series.push(new Map());
  equal(series.of("a"), []);
}

export function parameters_are_read_or_refused() {
  const { fields, faults } = requestFields({
    temperature: " 0 ",
    top_p: "1.5",
    max_tokens: "2.5",
    seed: "",
    tools: '{"name": "f"}',
  });
  equal(fields, { temperature: 0, tools: [{ type: "function", function: { name: "f" } }] });
  equal(Object.keys(faults), ["top_p", "max_tokens"]);
  equal(Object.keys(requestFields({ tools: "[{" }).faults), ["tools"]);
  equal(Object.keys(requestFields({ tools: "[null]" }).faults), ["tools"]);
}

class Store {
  #items = new Map();
  constructor(room = Infinity) {
    this.room = room;
  }
  getItem(name) {
    return this.#items.get(name) ?? null;
  }
  removeItem(name) {
    this.#items.delete(name);
  }
  setItem(name, value) {
    const others = [...this.#items].filter(([key]) => key !== name).reduce((sum, [, text]) => sum + text.length, 0);
    if (others + value.length > this.room) throw new Error("QuotaExceededError");
    this.#items.set(name, value);
  }
}
const chat = (id, updated, size = 10) => ({
  id,
  title: id,
  updated,
  turns: [{ id: "t", parent: null, role: "user", content: "x".repeat(size) }],
  chosen: {},
  settings: {},
});

export function history_is_bounded_in_number_and_size() {
  const history = new History(new Store());
  for (let number = 0; number < 230; number += 1) history.save(chat(`c${number}`, number));
  equal([history.entries().length, history.entries()[0].id], [200, "c229"]);
  equal(history.load("c0"), null);
  for (let number = 0; number < 5; number += 1) history.save(chat(`big${number}`, 1000 + number, 1_500_000));
  equal(
    history.entries().map((one) => one.id),
    ["big4", "big3"],
  );
  equal(history.save(chat("huge", 2000, 5_000_000)), false);
}

export function a_browser_with_little_room_keeps_the_newest() {
  const history = new History(new Store(3000));
  for (let number = 0; number < 10; number += 1)
    equal(history.save(chat(`c${number}`, number, 500)), true, `c${number}`);
  equal(history.entries()[0].id, "c9");
  equal(history.load("c9").turns[0].content.length, 500);
  equal(new History(new Store(0)).save(chat("c", 1)), false);
}

export function what_is_damaged_is_left_out() {
  const store = new Store();
  const history = new History(store);
  store.setItem("pagefleet.chats", '[1, {"id": "x"}, null');
  equal(history.entries(), []);
  store.setItem(
    "pagefleet.chat.x",
    JSON.stringify({ id: "x", turns: [null, { id: 5 }, { id: "a", role: "evil", content: "" }] }),
  );
  equal(history.load("x"), null);
}
