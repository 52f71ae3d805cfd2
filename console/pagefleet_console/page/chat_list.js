// The chats that this browser keeps, newest first; what can be done with all of them stands below.

import { button, h, keepChildren, setText } from "./dom.js";

/** @typedef {{open: (id: string) => void, begin: () => void, remove: (id: string) => void, clear: () => void, exported: () => string}} Acts */

/** The list at the side. */
export class ChatList {
  element;
  #list = h("ul");
  #acts;
  #clear;

  /** @param {Acts} acts */
  constructor(acts) {
    this.#acts = acts;
    // Asked twice, in place: a dialog would take the focus away.
    this.#clear = button("Clear all", () => this.#confirmClear(), {
      class: "quiet",
      onblur: () => setText(this.#clear, "Clear all"),
    });
    this.element = h(
      "nav",
      { class: "chats", id: "chats", "aria-label": "Chats" },
      button("New chat", acts.begin, { class: "begin" }),
      this.#list,
      h(
        "div",
        { class: "foot" },
        button("Export", () => this.#export(), { class: "quiet" }),
        this.#clear,
      ),
      h("p", { class: "note" }, "Kept in this browser only."),
    );
  }

  /** @param {import("./history.js").Entry[]} entries */
  update(entries, current) {
    keepChildren(
      this.#list,
      entries,
      (entry) => entry.id,
      (entry) => this.#make(entry),
      (item, entry) => {
        const [open, remove] = item.children;
        setText(open, entry.title || "Chat");
        open.setAttribute("aria-current", String(entry.id === current));
        remove.setAttribute("aria-label", `Delete ${entry.title || "this chat"}`);
      },
    );
    this.#clear.disabled = entries.length === 0;
  }

  #make({ id }) {
    const open = button("", () => this.#acts.open(id), { class: "open" });
    return h(
      "li",
      {},
      open,
      button("×", () => this.#acts.remove(id), { class: "quiet remove" }),
    );
  }

  #confirmClear() {
    if (this.#clear.textContent === "Clear all") setText(this.#clear, "Really clear all?");
    else {
      setText(this.#clear, "Clear all");
      this.#acts.clear();
    }
  }

  #export() {
    const url = URL.createObjectURL(new Blob([this.#acts.exported()], { type: "application/json" }));
    const link = h("a", { href: url, download: `pagefleet-chats-${new Date().toISOString().slice(0, 10)}.json` });
    link.click();
    setTimeout(() => URL.revokeObjectURL(url), 10_000);
  }
}
