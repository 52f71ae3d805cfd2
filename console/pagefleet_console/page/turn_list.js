// The turns that are shown, each as an article with what can be done about it.

import { AnswerView, resultElement } from "./answer_view.js";
import { button, copyText, h, keepChildren, longText, setText } from "./dom.js";
import { openCalls, shownPath, versionsOf } from "./tree.js";

/**
 * @typedef {import("./tree.js").Turn} Turn
 * @typedef {object} Acts
 * @property {(turn: Turn, by: number) => void} switchVersion
 * @property {(turn: Turn) => void} regenerate
 * @property {(turn: Turn, content: string) => void} edit
 * @property {(turn: Turn) => void} goOn
 * @property {(turn: Turn, results: Map<string, string>) => void} sendResults
 */

/** Shows a conversation, and the answer that comes. */
export class TurnList {
  element = h("div", { class: "turns", role: "log", "aria-label": "Conversation", "aria-live": "off" });
  /** @type {WeakMap<Element, {answer: AnswerView | null, versions: HTMLElement, again: HTMLElement | null}>} */
  #parts = new WeakMap();
  #acts;

  /** @param {Acts} acts */
  constructor(acts) {
    this.#acts = acts;
  }

  /**
   * Show a conversation as it is now.
   * @param {import("./tree.js").Conversation} chat
   * @param {string | null} streaming  the id of the turn that comes
   */
  update(chat, streaming) {
    const path = shownPath(chat);
    const names = new Map(path.flatMap((turn) => (turn.calls ?? []).map((call) => [call.id, call.name])));
    keepChildren(
      this.element,
      path,
      (turn) => turn.id,
      (turn) => this.#make(turn, names),
      (article, turn) => this.#update(article, turn, chat, { streaming, last: turn === path.at(-1) }),
    );
  }

  /** Show more of the one turn that comes, and look at no other. */
  grow(turn) {
    const article = [...this.element.children].findLast((one) => one.dataset.key === turn.id);
    this.#parts.get(article)?.answer?.update(turn, { streaming: true, open: [], last: true });
  }

  #make(turn, names) {
    const versions = h("span", { class: "versions" });
    const parts = { answer: null, versions, again: null };
    const article = turn.role === "assistant" ? this.#makeAnswer(turn, parts) : this.#makeOther(turn, parts, names);
    this.#parts.set(article, parts);
    return article;
  }

  #makeAnswer(turn, parts) {
    parts.answer = new AnswerView({
      goOn: () => this.#acts.goOn(turn),
      again: () => this.#acts.regenerate(turn),
      sendResults: (results) => this.#acts.sendResults(turn, results),
    });
    const copy = button("Copy", () => copyText(turn.content, copy), { class: "quiet" });
    parts.again = button("Regenerate", () => this.#acts.regenerate(turn), { class: "quiet" });
    const actions = h("div", { class: "actions" }, parts.versions, copy, parts.again);
    const who = h("h2", { class: "who" }, turn.model || "Model");
    return h(
      "article",
      { class: "turn assistant", "aria-label": `Answer by ${turn.model || "the model"}` },
      who,
      parts.answer.element,
      actions,
    );
  }

  #makeOther(turn, parts, names) {
    if (turn.role === "tool") {
      return h(
        "article",
        { class: "turn tool", "aria-label": "Result of a tool" },
        resultElement(turn, names.get(turn.call) ?? "a tool"),
      );
    }
    const body = h("div", { class: "said" }, longText(turn.content));
    for (const { data, name } of turn.pictures ?? []) body.append(h("img", { src: data, alt: name }));
    const edit = button("Edit", () => this.#edit(article, turn, edit), { class: "quiet" });
    const article = h(
      "article",
      { class: "turn user", "aria-label": "You" },
      body,
      h("div", { class: "actions" }, parts.versions, edit),
    );
    return article;
  }

  #update(article, turn, chat, { streaming, last }) {
    const { answer, versions, again } = this.#parts.get(article);
    const comes = streaming === turn.id;
    answer?.update(turn, { streaming: comes, open: openCalls(chat, turn), last });
    article.classList.toggle("comes", comes);
    article.setAttribute("aria-busy", String(comes));
    if (again) again.disabled = streaming !== null;
    this.#showVersions(versions, turn, chat, streaming !== null);
  }

  #showVersions(place, turn, chat, busy) {
    const { index, ids } = versionsOf(chat, turn);
    if (ids.length < 2) {
      place.replaceChildren();
      return;
    }
    if (!place.childElementCount) {
      const step = (by, label, text) =>
        button(text, () => this.#acts.switchVersion(turn, by), { class: "quiet step", "aria-label": label });
      place.append(step(-1, "Earlier version", "‹"), h("span"), step(1, "Later version", "›"));
    }
    const [back, where, on] = place.children;
    back.disabled = busy || index === 0;
    on.disabled = busy || index === ids.length - 1;
    setText(where, `${index + 1} of ${ids.length}`);
  }

  #edit(article, turn, opener) {
    const field = h("textarea", { class: "edit", "aria-label": "Edit what you said", rows: 4 });
    field.value = turn.content;
    const close = () => {
      form.remove();
      article.classList.remove("edited");
      opener.focus();
    };
    const submit = (event) => {
      event.preventDefault();
      close();
      if (field.value.trim() && field.value !== turn.content) this.#acts.edit(turn, field.value);
    };
    const onKey = (event) => {
      if (event.key === "Escape") close();
      else if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) submit(event);
      else return;
      event.stopPropagation();
    };
    field.addEventListener("keydown", onKey);
    const actions = h(
      "div",
      { class: "actions shown" },
      h("button", { class: "main" }, "Ask this instead"),
      button("Cancel", close),
    );
    const form = h("form", { onsubmit: submit }, field, actions);
    article.append(form);
    article.classList.add("edited");
    field.focus();
  }
}
