// Where the user enters a key. It is shown alone: who has no key sees nothing else.

import { h, setText } from "./dom.js";

/** A form; `enter` says whether the server knows the key. */
export class KeyView {
  element;
  #field = h("input", { type: "password", autocomplete: "off", spellcheck: "false", "aria-describedby": "key-note" });
  #note = h("p", { class: "fault", role: "alert" });
  #button = h("button", { class: "main" }, "Enter");

  /** @param {(key: string) => Promise<string>} enter  returns what is wrong, or nothing */
  constructor(enter) {
    const onsubmit = async (event) => {
      event.preventDefault();
      const key = this.#field.value.trim();
      if (!key) return;
      this.#button.disabled = true;
      const wrong = /^[\x21-\x7e]+$/.test(key) ? await enter(key) : "A key is of ASCII letters, digits and signs.";
      this.#button.disabled = false;
      setText(this.#note, wrong);
      this.#field.select();
      if (!wrong) this.#field.value = "";
    };
    this.element = h(
      "section",
      { class: "key", "aria-labelledby": "key-title", hidden: true },
      h("h1", { id: "key-title" }, "This server asks for a key"),
      h("form", { onsubmit }, h("label", {}, "API key", this.#field), this.#button),
      this.#note,
      h("p", { class: "note", id: "key-note" }, "It is kept until this tab is closed, and sent to this server only."),
    );
  }

  focus(wrong = "") {
    setText(this.#note, wrong);
    this.#field.focus();
  }
}
