// One answer of the model: its thought, its text, its calls, its figures, and what ended it early.

import { button, h, longText, setShown, setText } from "./dom.js";
import { count, percent, plural, seconds } from "./format.js";
import { canGoOn } from "./remedies.js";
import { MarkdownView } from "./render.js";
import { weighingTable } from "./weighing.js";

const FINISHES = {
  length: "stopped at its limit of tokens",
  stopped: "stopped by you",
  content_filter: "stopped by a filter",
};

/**
 * Shows a turn of the assistant, and follows it while it comes.
 * @typedef {{goOn: () => void, again: () => void, sendResults: (results: Map<string, string>) => void}} Acts
 */
export class AnswerView {
  element;
  #text = new MarkdownView();
  #thought = new MarkdownView();
  #thoughtBox;
  #thoughtTitle = h("summary");
  #calls = h("div", { class: "calls" });
  #trouble = h("div");
  #figures = h("p", { class: "tally" });
  #why = h("details", { class: "why", hidden: true });
  #waiting = h("p", { class: "waiting" }, "Waiting for the first token");
  #acts;
  #folded = false;
  #shownTrouble;
  #shownPath;

  /** @param {Acts} acts */
  constructor(acts) {
    this.#acts = acts;
    this.#thoughtBox = h("details", { class: "thought", hidden: true }, this.#thoughtTitle, this.#thought.element);
    this.element = h(
      "div",
      { class: "answer" },
      this.#thoughtBox,
      this.#text.element,
      this.#waiting,
      this.#calls,
      this.#trouble,
      this.#figures,
      this.#why,
    );
  }

  /**
   * Show the turn as it is now.
   * @param {import("./tree.js").Turn} turn
   * @param {{streaming: boolean, open: {id: string}[], last: boolean}} at  open: calls without a result
   */
  update(turn, { streaming, open, last }) {
    this.#showThought(turn, streaming);
    this.#text.update(turn.content);
    this.#showCalls(turn, streaming, last ? open : []);
    const empty = !turn.content && !turn.reasoning && !turn.calls?.length;
    setShown(this.#waiting, streaming && empty);
    this.#showTrouble(turn, streaming, last);
    setText(this.#figures, streaming && empty ? "" : tally(turn));
    this.#showPath(turn, streaming);
  }

  #showThought(turn, streaming) {
    setShown(this.#thoughtBox, Boolean(turn.reasoning));
    if (!turn.reasoning) return;
    const thinking = streaming && !turn.content && !turn.calls?.length;
    const took = turn.figures?.thought;
    setText(this.#thoughtTitle, thinking ? "Thinking" : took ? `Thought for ${seconds(took)}` : "Thought");
    // Open while it comes, folded once; whoever opens it then keeps it open.
    if (thinking && !this.#folded) this.#thoughtBox.open = true;
    else if (!thinking && !this.#folded) {
      this.#thoughtBox.open = false;
      this.#folded = true;
    }
    this.#thought.update(turn.reasoning);
  }

  #showCalls(turn, streaming, open) {
    const calls = turn.calls ?? [];
    while (this.#calls.children.length < calls.length) this.#calls.append(callElement());
    for (const [index, call] of calls.entries()) {
      const box = this.#calls.children[index];
      updateCall(box, call, streaming);
    }
    const form = this.#calls.querySelector("form");
    const wanted = !streaming && open.length ? open.map((call) => call.id).join(" ") : "";
    if ((form?.dataset.calls ?? "") === wanted) return;
    form?.remove();
    if (wanted) this.#calls.append(resultsForm(open, this.#acts.sendResults));
  }

  #showTrouble(turn, streaming, last) {
    const shown = streaming ? null : (turn.error ?? null);
    const key = shown
      ? `${last}${JSON.stringify(shown)}`
      : turn.finish === "length" || turn.finish === "stopped"
        ? `${last}${streaming}`
        : "";
    if (key === this.#shownTrouble) return;
    this.#shownTrouble = key;
    this.#trouble.replaceChildren();
    if (shown) this.#trouble.append(troubleBox(shown, last && this.#ways(turn, shown)));
    else if (key && last && !streaming && turn.content)
      this.#trouble.append(h("p", { class: "ways" }, button("Go on from here", this.#acts.goOn)));
  }

  #ways(turn, fault) {
    const again = button("Try again", this.#acts.again);
    const goesOn = turn.content && !turn.calls?.length && canGoOn(fault);
    return h(
      "p",
      { class: "ways" },
      goesOn ? button("Go on from here", this.#acts.goOn, { class: "main" }) : null,
      again,
    );
  }

  #showPath(turn, streaming) {
    setShown(this.#why, Boolean(turn.path && !streaming));
    if (!turn.path || streaming || this.#shownPath === turn.path) return;
    this.#shownPath = turn.path;
    const summary = h("summary", {}, turn.path.engine ? `Answered by ${turn.path.engine}` : "How it was routed");
    const id = h("p", { class: "note" }, "Request ", h("code", {}, turn.path.request ?? "without an id"));
    this.#why.replaceChildren(summary, weighingTable(turn.path), id);
  }
}

/** Say the figures of an answer in one line. */
function tally(turn) {
  const figures = turn.figures;
  if (!figures) return FINISHES[turn.finish] ?? "";
  const parts = [
    figures.tokens !== null ? plural(figures.tokens, "token") : null,
    figures.rate !== null ? `${count(figures.rate)} tokens/s` : null,
    figures.firstToken !== null ? `first token after ${seconds(figures.firstToken)}` : null,
    figures.prompt
      ? `prompt of ${count(figures.prompt)}, ${percent((figures.cached ?? 0) / figures.prompt)} cached`
      : null,
    FINISHES[turn.finish] ?? null,
  ];
  return parts.filter(Boolean).join(" · ");
}

function callElement() {
  return h("details", { class: "call", open: true }, h("summary"), h("pre", { class: "plain" }));
}

function updateCall(box, call, streaming) {
  const [title, body] = box.children;
  setText(title, `${streaming ? "Calls" : "Called"} ${call.name || "a tool"}`);
  setText(body, streaming ? call.arguments : indented(call.arguments));
  if (!streaming && !box.dataset.folded) {
    box.dataset.folded = "yes";
    box.open = call.arguments.length < 400;
  }
}

/** JSON over several lines where it is JSON; else the text as it came, for the model may have broken it. */
function indented(text) {
  if (text.length > 50_000) return text;
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}

function resultsForm(open, send) {
  const fields = open.map((call) => [call.id, h("textarea", { rows: 2, spellcheck: "false" })]);
  const labels = fields.map(([, field], index) => h("label", {}, `Result of ${open[index].name}`, field));
  const submit = (event) => {
    event.preventDefault();
    send(new Map(fields.map(([id, field]) => [id, field.value])));
  };
  const form = h(
    "form",
    { class: "results", onsubmit: submit },
    ...labels,
    h("button", { class: "main" }, "Send results"),
  );
  form.dataset.calls = open.map((call) => call.id).join(" ");
  return form;
}

/** What went wrong and what to do; read aloud as it appears. */
export function troubleBox(fault, ways = null) {
  const ids = [fault.code, fault.request ? `request ${fault.request}` : null].filter(Boolean).join(" · ");
  const wait = fault.wait ? ` The server asks to wait ${seconds(fault.wait)}.` : "";
  return h(
    "div",
    { class: "trouble", role: "alert" },
    h("p", { class: "what" }, fault.what),
    fault.remedy || wait ? h("p", {}, `${fault.remedy}${wait}`) : null,
    ids ? h("p", { class: "note" }, ids) : null,
    ways,
  );
}

/** What a tool gave back, as the user pasted it. */
export function resultElement(turn, name) {
  return h("details", { class: "call" }, h("summary", {}, `Result of ${name}`), longText(turn.content));
}
