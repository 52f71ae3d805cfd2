// The panel of a chat's parameters: empty fields are left to the server.

import { button, h, setText } from "./dom.js";
import { DEFAULTS, NUMBERS, TOOLS_EXAMPLE, requestFields } from "./settings.js";

/** Holds the settings of the chat that is shown, and says at each field what is wrong with it. */
export class SettingsPanel {
  element;
  /** @type {Map<string, {field: HTMLElement, fault: HTMLElement}>} */
  #entries = new Map();
  #changed;

  /** @param {() => void} changed */
  constructor(changed, close) {
    this.#changed = changed;
    const numbers = NUMBERS.map(({ name, label, whole }) =>
      this.#entry(
        name,
        label,
        h("input", {
          inputmode: whole ? "numeric" : "decimal",
          placeholder: "as the server has it",
          autocomplete: "off",
        }),
      ),
    );
    const example = button(
      "Fill in an example",
      () => {
        const { field } = this.#entries.get("tools");
        if (!field.value.trim()) field.value = TOOLS_EXAMPLE;
        field.focus();
        this.#check();
      },
      { class: "quiet" },
    );
    this.element = h(
      "aside",
      { class: "settings", id: "settings", "aria-label": "Parameters", hidden: true },
      h("div", { class: "head" }, h("h2", {}, "Parameters"), button("Close", close, { class: "quiet" })),
      this.#entry("system", "System prompt", h("textarea", { rows: 5 })),
      h("div", { class: "pair" }, ...numbers),
      this.#entry("tools", "Tools, as JSON", h("textarea", { rows: 8, spellcheck: "false", class: "mono" })),
      example,
      h("p", { class: "note" }, "What a tool gives back is pasted below its call. This page runs no tool."),
    );
  }

  /** @returns {import("./settings.js").Settings} but for the model */
  get values() {
    return Object.fromEntries([...this.#entries].map(([name, { field }]) => [name, field.value]));
  }

  set values(settings) {
    for (const [name, { field }] of this.#entries) field.value = String(settings[name] ?? DEFAULTS[name]);
    this.#check();
  }

  /** Show the first field that is wrong. Returns whether there is one. */
  showFaults() {
    const [name] = Object.keys(requestFields(this.values).faults);
    if (!name) return false;
    this.element.hidden = false;
    this.#entries.get(name).field.focus();
    return true;
  }

  #entry(name, label, field) {
    const fault = h("span", { class: "fault", id: `fault-${name}` });
    field.setAttribute("aria-describedby", fault.id);
    field.addEventListener("input", () => this.#check());
    field.addEventListener("change", () => this.#changed());
    this.#entries.set(name, { field, fault });
    return h("label", {}, label, field, fault);
  }

  #check() {
    const { faults } = requestFields(this.values);
    for (const [name, { field, fault }] of this.#entries) {
      setText(fault, faults[name] ?? "");
      field.setAttribute("aria-invalid", String(name in faults));
    }
  }
}
