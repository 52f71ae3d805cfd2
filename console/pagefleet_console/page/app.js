// The page: which view is shown, the fleet's state for all of them, and the key.

import { ChatView } from "./chat_view.js";
import { button, h, setShown, setText } from "./dom.js";
import { fleetHealth, fleetSum } from "./fleet_sum.js";
import { FleetView } from "./fleet_view.js";
import { KeyView } from "./key_view.js";
import { Poller } from "./poller.js";
import { RequestView } from "./request_view.js";
import { Server } from "./server.js";

const VIEWS = ["chat", "fleet", "requests"];
const KEYS = [
  ["Enter", "send what is written"],
  ["Shift+Enter", "begin a line"],
  ["Escape", "stop the answer; close what is open"],
  ["Shift+Escape", "go to the message"],
  ["Ctrl+Shift+O", "new chat"],
  ["Ctrl+Enter", "ask what was edited instead"],
  ["Ctrl+/", "this list"],
];

class App {
  #server = new Server(sessionStorage);
  #views;
  #key;
  #poller;
  #modelNames = null;
  #main = document.getElementById("main");
  #health = document.getElementById("health");
  #forget = button("Forget the key", () => this.#forgetKey(), { class: "quiet", hidden: true });
  #help;

  constructor() {
    const server = this.#server;
    const needKey = () => this.#askForKey("");
    this.#views = {
      chat: new ChatView({ server, local: localStorage, session: sessionStorage, needKey }),
      fleet: new FleetView(),
      requests: new RequestView(server),
    };
    this.#key = new KeyView((key) => this.#enter(key));
    this.#poller = new Poller(
      () => server.state(),
      (seen) => this.#take(seen),
    );
    this.#help = helpDialog();
    for (const view of Object.values(this.#views)) view.element.hidden = true;
    this.#main.replaceChildren(this.#key.element, ...Object.values(this.#views).map((view) => view.element));
    document.getElementById("service").append(this.#forget);
    document.body.append(this.#help);
    addEventListener("hashchange", () => this.#show(true));
    addEventListener("keydown", (event) => this.#onKey(event));
  }

  /** Ask whether a key is needed, and show the page if there is none or it is known. */
  async start() {
    try {
      this.#setModels(await this.#models());
    } catch (error) {
      if (error.needsKey) {
        this.#askForKey(this.#server.key ? "The server does not know the key that this tab had." : "");
        return;
      }
      this.#setModels([]); // it may come: the state says so
    }
    this.#open();
  }

  #open() {
    setShown(this.#key.element, false);
    document.body.classList.remove("locked");
    setShown(this.#forget, this.#server.key !== "");
    this.#views.chat.restore();
    this.#show(false);
    this.#poller.start();
  }

  #show(moved) {
    if (document.body.classList.contains("locked")) return;
    const wanted = location.hash.slice(1);
    const name = VIEWS.includes(wanted) ? wanted : "chat";
    for (const one of VIEWS) setShown(this.#views[one].element, one === name);
    for (const link of document.querySelectorAll("nav.views a")) {
      if (link.getAttribute("href") === `#${name}`) link.setAttribute("aria-current", "page");
      else link.removeAttribute("aria-current");
    }
    if (name === "chat") this.#views.chat.focus();
    else {
      this.#views[name].draw();
      if (moved) this.#main.focus();
    }
  }

  /** @param {import("./poller.js").Seen} seen */
  #take(seen) {
    if (seen.trouble?.status === 401) {
      this.#askForKey("The server does not know this key any more.");
      return;
    }
    const health = seen.fresh ? fleetHealth(fleetSum(seen.state.engines)) : { tone: "bad", text: "no answer" };
    this.#health.dataset.tone = health.tone;
    setText(this.#health, [seen.state?.service.name, health.text].filter(Boolean).join(" · "));
    this.#views.fleet.take(seen);
    this.#views.requests.take(seen);
    const names = seen.state?.service.models.join("\n") ?? this.#modelNames;
    if (names !== this.#modelNames) this.#askForModels(names);
  }

  async #askForModels(names) {
    this.#modelNames = names;
    try {
      this.#setModels(await this.#server.models());
    } catch {
      this.#modelNames = null; // with the next state
    }
  }

  /** Return the models; none while the engine loads, which asks for a key all the same. */
  async #models() {
    try {
      return await this.#server.models();
    } catch (error) {
      if (!error.isLoading) throw error;
      await this.#server.state();
      return [];
    }
  }

  #setModels(models) {
    this.#views.chat.setModels(models);
    this.#views.requests.setModels(models);
  }

  async #enter(key) {
    const before = this.#server.key;
    this.#server.key = key;
    try {
      this.#setModels(await this.#models());
    } catch (error) {
      this.#server.key = before;
      return error.needsKey
        ? "The server does not know this key."
        : (error.trouble?.what ?? "The server did not answer.");
    }
    this.#open();
    return "";
  }

  #askForKey(wrong) {
    this.#poller.stop();
    this.#views.chat.stop();
    this.#server.key = "";
    for (const view of Object.values(this.#views)) setShown(view.element, false);
    document.body.classList.add("locked");
    setText(this.#health, "");
    setShown(this.#forget, false);
    setShown(this.#key.element, true);
    this.#key.focus(wrong);
  }

  #forgetKey() {
    this.#askForKey("");
    location.reload(); // nothing that the key showed stays in the page
  }

  #onKey(event) {
    if (document.body.classList.contains("locked")) return;
    if (event.key === "Escape" && event.shiftKey) location.hash = "#chat";
    else if (event.key === "O" && event.ctrlKey && event.shiftKey) {
      location.hash = "#chat";
      this.#views.chat.begin();
    } else if (event.key === "/" && event.ctrlKey) this.#help.showModal();
    else if (event.key === "Escape" && !event.defaultPrevented) {
      this.#views.chat.stop();
      return;
    } else return;
    if (location.hash === "#chat") this.#views.chat.focus();
    event.preventDefault();
  }
}

function helpDialog() {
  const rows = KEYS.map(([keys, what]) => h("div", {}, h("dt", {}, h("kbd", {}, keys)), h("dd", {}, what)));
  const close = button("Close", () => dialog.close(), { class: "quiet" });
  const dialog = h(
    "dialog",
    { "aria-label": "Keys" },
    h("div", { class: "head" }, h("h2", {}, "Keys"), close),
    h("dl", {}, ...rows),
  );
  return dialog;
}

await new App().start();
