// The last requests, one of them explained, and one sent to see how it is routed.

import { troubleBox } from "./answer_view.js";
import { button, copyText, h, keepChildren, setShown, setText } from "./dom.js";
import { exchange } from "./exchange.js";
import { UNKNOWN, count, percent, plural, seconds, timeOfDay } from "./format.js";
import { weighingTable } from "./weighing.js";

const HEADS = ["Time", "Request", "Model", "Status", "Took", "First token", "Prompt", "Answer", "Engine"];

/** The view at #requests. */
export class RequestView {
  element;
  #server;
  #trial;
  #body = h("tbody");
  #none = h("p", { class: "note" }, "No request is over yet.");
  #detail = h("section", { class: "card detail", "aria-live": "polite", hidden: true });
  #table;
  #requests = [];
  #chosen = null;
  #shownDetail = "";

  /** @param {import("./server.js").Server} server */
  constructor(server) {
    this.#server = server;
    this.#trial = new Trial(server);
    const heads = HEADS.map((text, index) =>
      h("th", { scope: "col", class: index >= 4 && index <= 7 ? "figure" : null }, text),
    );
    const table = h("table", { class: "requests" }, h("thead", {}, h("tr", {}, ...heads)), this.#body);
    this.#table = h("div", { class: "wide", tabindex: 0, role: "region", "aria-label": "The last requests" }, table);
    this.element = h(
      "section",
      { class: "page", "aria-label": "Requests" },
      h("div", { class: "title" }, h("h1", {}, "Requests")),
      this.#trial.element,
      h("h2", {}, "The last ones"),
      this.#none,
      h("div", { class: "split" }, this.#table, this.#detail),
    );
  }

  /** @param {import("./poller.js").Seen} seen */
  take({ state }) {
    this.#requests = state?.requests ?? [];
    if (!this.element.hidden) this.draw();
  }

  setModels(models) {
    this.#trial.setModels(models);
  }

  draw() {
    setShown(this.#none, this.#requests.length === 0);
    setShown(this.#table, this.#requests.length > 0);
    const make = ({ id }) => {
      const opens = button(id.slice(0, 12), () => this.#choose(id), { class: "link mono", title: id });
      const cells = HEADS.slice(2).map((_, index) => h("td", { class: index >= 2 && index <= 5 ? "figure" : null }));
      return h("tr", {}, h("td"), h("th", { scope: "row" }, opens), ...cells);
    };
    keepChildren(
      this.#body,
      this.#requests,
      (one) => one.id,
      make,
      (row, one) => this.#update(row, one),
    );
    const chosen = this.#requests.find((one) => one.id === this.#chosen);
    if (chosen) this.#explain(chosen);
  }

  #update(row, one) {
    const texts = [
      timeOfDay(one.at),
      null,
      one.model ?? UNKNOWN,
      one.error ? `${one.status} ${one.error}` : String(one.status),
      seconds(one.seconds),
      seconds(one.ttft_seconds),
      one.prompt_tokens
        ? `${count(one.prompt_tokens)}, ${percent(one.cached_tokens / one.prompt_tokens)} cached`
        : count(one.prompt_tokens),
      count(one.generated_tokens),
      one.prefill_engine ? `${one.prefill_engine} → ${one.engine ?? UNKNOWN}` : (one.engine ?? UNKNOWN),
    ];
    for (const [index, text] of texts.entries()) if (text !== null) setText(row.children[index], text);
    row.children[3].classList.toggle("bad", one.status >= 500 || one.error !== null);
    row.classList.toggle("chosen", one.id === this.#chosen);
    row.querySelector("button").setAttribute("aria-pressed", String(one.id === this.#chosen));
  }

  #choose(id) {
    this.#chosen = this.#chosen === id ? null : id;
    setShown(this.#detail, this.#chosen !== null);
    this.draw();
  }

  #explain(one) {
    const key = JSON.stringify(one);
    if (key === this.#shownDetail) return;
    this.#shownDetail = key;
    const trace = one.trace_id;
    const copy = button("Copy", () => copyText(trace, copy), { class: "quiet", "aria-label": "Copy the trace's id" });
    this.#detail.replaceChildren(
      h("h2", {}, "What happened to it"),
      timeline(one),
      h("ol", { class: "steps" }, ...stepsOf(one).map((text) => h("li", {}, text))),
      h("p", { class: "note" }, "Request ", h("code", {}, one.id)),
      h(
        "p",
        { class: "note" },
        ...(trace
          ? ["Trace ", h("code", {}, trace), " ", copy]
          : ["It was not traced: docs/tracing.md says how to trace requests."]),
      ),
      one.tenant ? h("p", { class: "note" }, `Asked by ${one.tenant}`) : null,
    );
  }
}

/** Say in sentences what became of a request. @param {object} one  RequestState of the protocol */
export function stepsOf(one) {
  const steps = [`It asked ${one.model ?? "no model by name"} at ${one.route}.`];
  if (one.queue_seconds >= 0.001) steps.push(`It waited ${seconds(one.queue_seconds)} at the door.`);
  for (const engine of one.tried) steps.push(`${engine} was tried, and failed it.`);
  if (one.prefill_engine) steps.push(`${one.prefill_engine} computed its prompt${sizeOf(one)}.`);
  if (one.engine && !one.tried.includes(one.engine)) {
    steps.push(
      one.prefill_engine ? `${one.engine} answered from there.` : `${one.engine} got its prompt${sizeOf(one)}.`,
    );
  }
  if (!one.attempts) steps.push("It was sent to no engine.");
  if (one.ttft_seconds !== null) steps.push(`Its first byte came after ${seconds(one.ttft_seconds)}.`);
  const tokens = one.generated_tokens === null ? "" : ` with ${plural(one.generated_tokens, "token")}`;
  if (one.status === 499) steps.push(`Its client left after ${seconds(one.seconds)}.`);
  else
    steps.push(`It ended after ${seconds(one.seconds)}${tokens}: ${one.status}${one.error ? `, ${one.error}` : ""}.`);
  return steps;
}

function sizeOf({ prompt_tokens: prompt, cached_tokens: cached }) {
  if (prompt === null) return "";
  return cached
    ? ` of ${plural(prompt, "token")}, of which it probably had ${count(cached)}`
    : ` of ${plural(prompt, "token")}`;
}

function timeline(one) {
  const first = one.ttft_seconds ?? one.seconds;
  const parts = [
    ["queue", "at the door", one.queue_seconds],
    ["prompt", "until the first byte", Math.max(0, first - one.queue_seconds)],
    ["answer", "answer", Math.max(0, one.seconds - first)],
  ].filter(([, , value]) => value > 0);
  const bars = parts.map(([name, , value]) => {
    const bar = h("span", { class: `part-${name}` });
    bar.style.flexGrow = String(value / (one.seconds || 1));
    return bar;
  });
  const words = parts.map(([name, text, value]) =>
    h("span", {}, h("i", { class: `part-${name}` }), `${text} ${seconds(value)}`),
  );
  return h(
    "div",
    { class: "timeline" },
    h("div", { class: "bars", "aria-hidden": "true" }, ...bars),
    h("p", { class: "note" }, ...words),
  );
}

/** A request sent from here, to see how each engine was weighed for it. */
class Trial {
  element;
  #server;
  #model = h("select", { "aria-label": "Model" });
  #prompt = h("input", { "aria-label": "Prompt", placeholder: "A prompt to route", autocomplete: "off" });
  #send = h("button", { class: "main" }, "Send and explain");
  #result = h("div", { "aria-live": "polite" });

  constructor(server) {
    this.#server = server;
    const onsubmit = (event) => {
      event.preventDefault();
      if (this.#prompt.value.trim() && !this.#send.disabled) this.#try();
    };
    const form = h("form", { class: "row", onsubmit }, this.#model, this.#prompt, this.#send);
    this.element = h(
      "section",
      { class: "card", "aria-label": "Explain a request" },
      h("h2", {}, "Why this engine?"),
      form,
      this.#result,
    );
  }

  setModels(models) {
    const chosen = this.#model.value;
    this.#model.replaceChildren(...models.map(({ id }) => h("option", { value: id, selected: id === chosen }, id)));
  }

  async #try() {
    this.#send.disabled = true;
    const turn = { content: "", reasoning: "" };
    const body = {
      model: this.#model.value,
      max_tokens: 16,
      messages: [{ role: "user", content: this.#prompt.value }],
    };
    const options = { signal: AbortSignal.timeout(120_000), changed: () => {}, now: () => performance.now() };
    await exchange(this.#server, body, turn, options);
    this.#send.disabled = false;
    if (turn.error && !turn.path) {
      this.#result.replaceChildren(troubleBox(turn.error));
      return;
    }
    const told = `“${(turn.content || turn.reasoning).trim()}”, first token after ${seconds(turn.figures.firstToken)}`;
    this.#result.replaceChildren(
      weighingTable(turn.path),
      h("p", { class: "note" }, told),
      turn.error
        ? troubleBox(turn.error)
        : h("p", { class: "note" }, "Request ", h("code", {}, turn.path.request ?? UNKNOWN)),
    );
  }
}
