// The chat: one conversation, the list of those kept, and what the user does with them.

import { ChatList } from "./chat_list.js";
import { Composer } from "./composer.js";
import { announce, button, h, setShown, setText } from "./dom.js";
import { exchange } from "./exchange.js";
import { plural } from "./format.js";
import { History } from "./history.js";
import { Pace } from "./pace.js";
import { requestFields } from "./settings.js";
import { SettingsPanel } from "./settings_panel.js";
import { addTurn, messagesUpTo, newConversation, openCalls, shownPath, switchVersion, turnOf } from "./tree.js";
import { TurnList } from "./turn_list.js";

const CURRENT = "pagefleet.chat";
const NEAR = 80;

/** The view at #chat. */
export class ChatView {
  element;
  #server;
  #storage;
  #history;
  #chat;
  /** What comes: the turn, and how to stop it. @type {{turn: import("./tree.js").Turn, stop: AbortController} | null} */
  #coming = null;
  #turns;
  #composer;
  #panel;
  #list;
  #scroller;
  #welcome = h("div", { class: "welcome" });
  #note = h("p", { class: "note", role: "status" });
  #needKey;

  /** @param {{server: import("./server.js").Server, local: Storage, session: Storage, needKey: () => void}} parts */
  constructor({ server, local, session, needKey }) {
    this.#server = server;
    this.#storage = session;
    this.#history = new History(local);
    this.#needKey = needKey;
    this.#turns = new TurnList({
      switchVersion: (turn, by) => this.#switchVersion(turn, by),
      regenerate: (turn) => this.#answer(turn.parent),
      edit: (turn, content) => this.#say({ ...turn, content }),
      goOn: (turn) => this.#goOn(turn),
      sendResults: (turn, results) => this.#sendResults(turn, results),
    });
    this.#panel = new SettingsPanel(
      () => this.#keepSettings(),
      () => this.#toggle(this.#panel.element, opener),
    );
    const opener = button("Parameters", () => this.#toggle(this.#panel.element, opener), {
      class: "quiet",
      "aria-controls": "settings",
      "aria-expanded": "false",
    });
    this.#composer = new Composer({
      send: (text, pictures) => this.#send(text, pictures),
      stop: () => this.stop(),
      pickModel: () => this.#keepSettings(),
      settings: opener,
    });
    this.#list = new ChatList({
      open: (id) => this.#open(this.#history.load(id)),
      begin: () => this.begin(),
      remove: (id) => this.#remove(id),
      clear: () => this.#clear(),
      exported: () => this.#history.exported(),
    });
    const chats = button("Chats", () => this.#toggle(this.#list.element, chats), {
      class: "quiet narrow",
      "aria-controls": "chats",
      "aria-expanded": "false",
    });
    this.#scroller = h("div", { class: "scroll", tabindex: -1 }, this.#welcome, this.#turns.element);
    const middle = h("div", { class: "talk" }, chats, this.#scroller, this.#note, this.#composer.element);
    this.element = h(
      "section",
      { class: "chat", "aria-label": "Chat" },
      this.#list.element,
      middle,
      this.#panel.element,
    );
    this.#chat = newConversation(crypto.randomUUID(), Date.now());
  }

  /** Show what was kept: the chat that this tab had open, else a new one. */
  restore() {
    const kept = this.#history.load(this.#storage.getItem(CURRENT) ?? "");
    this.#open(kept ?? newConversation(crypto.randomUUID(), Date.now(), this.#lastSettings()));
  }

  /** @param {import("./server.js").Model[]} models */
  setModels(models) {
    const chosen = this.#composer.model || this.#chat.settings.model;
    this.#composer.setModels(models, chosen);
    this.#welcomeWith(models);
  }

  focus() {
    this.#composer.focus();
  }

  /** Begin a new chat with the settings of this one. */
  begin() {
    this.#open(newConversation(crypto.randomUUID(), Date.now(), this.#chat.settings));
    this.#composer.focus();
  }

  stop() {
    this.#coming?.stop.abort();
  }

  #open(chat) {
    if (!chat) return;
    this.stop();
    this.#chat = chat;
    this.#storage.setItem(CURRENT, chat.id);
    this.#panel.values = chat.settings;
    this.#composer.setModel(chat.settings.model);
    this.#turns.element.replaceChildren();
    this.#list.element.classList.remove("open");
    this.#show();
    this.#scroller.scrollTop = this.#scroller.scrollHeight;
  }

  #show() {
    const coming = this.#coming && turnOf(this.#chat, this.#coming.turn.id) ? this.#coming.turn.id : null;
    this.#turns.update(this.#chat, coming);
    this.#composer.busy = coming !== null;
    setShown(this.#welcome, this.#chat.turns.length === 0);
    this.#list.update(this.#history.entries(), this.#chat.id);
  }

  #keep(chat) {
    chat.updated = Date.now();
    const kept = this.#history.save(chat);
    setText(this.#note, kept ? "" : "This chat is too large for this browser to keep: export it, or begin a new one.");
  }

  #lastSettings() {
    const [last] = this.#history.entries();
    return (last && this.#history.load(last.id)?.settings) || {};
  }

  #keepSettings() {
    this.#chat.settings = { ...this.#panel.values, model: this.#composer.model };
    if (this.#chat.turns.length) this.#keep(this.#chat);
  }

  #remove(id) {
    this.#history.remove(id);
    if (id === this.#chat.id) this.begin();
    else this.#show();
  }

  #clear() {
    this.#history.clear();
    this.begin();
  }

  #send(text, pictures) {
    if (this.#panel.showFaults()) {
      this.#composer.restore(text);
      return;
    }
    const parent = shownPath(this.#chat).at(-1)?.id ?? null;
    this.#say({ parent, content: text, pictures });
  }

  /** Add what the user says below `parent`, and have it answered. */
  #say({ parent, content, pictures = [] }) {
    if (this.#coming || this.#panel.showFaults()) return;
    const turn = addTurn(this.#chat, { id: crypto.randomUUID(), parent, role: "user", content, pictures });
    this.#answer(turn.id);
  }

  #sendResults(turn, results) {
    if (this.#coming) return;
    let parent = turn.id;
    for (const call of openCalls(this.#chat, turn)) {
      const content = results.get(call.id) ?? "";
      parent = addTurn(this.#chat, { id: crypto.randomUUID(), parent, role: "tool", call: call.id, content }).id;
    }
    this.#answer(parent);
  }

  /** Have the turn `parent` answered, beside the answers that it has. */
  #answer(parent) {
    if (this.#coming || this.#panel.showFaults()) return;
    const turn = { id: crypto.randomUUID(), parent, role: "assistant", content: "", model: this.#composer.model };
    const messages = messagesUpTo(this.#chat, turnOf(this.#chat, parent) ?? null, this.#panel.values.system);
    addTurn(this.#chat, turn);
    this.#exchange(turn, { messages });
  }

  /** Have an answer continued where it ended. */
  #goOn(turn) {
    if (this.#coming) return;
    const messages = messagesUpTo(this.#chat, turn, this.#panel.values.system);
    this.#exchange(turn, { messages, continue_final_message: true, add_generation_prompt: false });
  }

  async #exchange(turn, asked) {
    const chat = this.#chat;
    const stop = new AbortController();
    this.#coming = { turn, stop };
    this.#chat.settings = { ...this.#panel.values, model: this.#composer.model };
    this.#keep(chat);
    this.#show();
    this.#follow(true);
    announce("Answering");
    const pace = new Pace(() => this.#grow(chat, turn));
    const body = { model: turn.model, ...requestFields(this.#panel.values).fields, ...asked };
    const options = { signal: stop.signal, changed: () => pace.ask(), now: () => performance.now() };
    const needsKey = await exchange(this.#server, body, turn, options);
    pace.end();
    this.#coming = null;
    this.#keep(chat);
    if (chat === this.#chat) this.#follow(false, () => this.#show());
    announce(turn.error ? turn.error.what : `Answer complete, ${plural(turn.figures?.tokens ?? null, "token")}`);
    if (needsKey) this.#needKey();
  }

  #grow(chat, turn) {
    if (chat === this.#chat) this.#follow(false, () => this.#turns.grow(turn));
  }

  /** Stay at the end of the text while the user is there; never take them away from where they read. */
  #follow(always, change = () => {}) {
    const { scrollTop, clientHeight, scrollHeight } = this.#scroller;
    const near = scrollHeight - scrollTop - clientHeight < NEAR;
    change();
    if (always || near) this.#scroller.scrollTop = this.#scroller.scrollHeight;
  }

  #switchVersion(turn, by) {
    if (this.#coming) return;
    const id = switchVersion(this.#chat, turn, by);
    this.#keep(this.#chat);
    this.#show();
    // The same button of the version that came: whoever walks through versions stays on it.
    const article = [...this.#turns.element.children].find((one) => one.dataset.key === id);
    const steps = [...article.querySelectorAll(".step")];
    (steps[by < 0 ? 0 : 1].disabled ? steps[by < 0 ? 1 : 0] : steps[by < 0 ? 0 : 1]).focus();
  }

  #toggle(panel, opener) {
    const overlay = panel === this.#list.element;
    const shown = overlay ? panel.classList.toggle("open") : panel.hidden;
    if (!overlay) panel.hidden = !shown;
    opener.setAttribute("aria-expanded", String(shown));
    if (shown) panel.querySelector("textarea, button.begin, input")?.focus();
    else opener.focus();
  }

  #welcomeWith(models) {
    const named = models.map(({ id, length }) => (length ? `${id}, ${length.toLocaleString()} tokens of context` : id));
    this.#welcome.replaceChildren(
      h("h1", {}, models.length ? `Talk to ${models[0].id}` : "No model is served yet"),
      ...(models.length > 1
        ? [h("ul", {}, ...named.map((text) => h("li", {}, text)))]
        : named.map((text) => h("p", { class: "note" }, text))),
      h(
        "p",
        { class: "note" },
        models.length
          ? "Enter sends, Shift+Enter begins a line, Escape stops."
          : "Fleet shows how far the engines are.",
      ),
    );
  }
}
