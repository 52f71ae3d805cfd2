// Where the user writes: the text, the model, pictures where the model takes them, and one button that sends or stops.

import { button, h, setShown, setText } from "./dom.js";
import { readPicture } from "./pictures.js";

/** A form that grows with its text. Enter sends, Shift+Enter begins a line, Escape stops. */
export class Composer {
  element;
  /** @type {import("./tree.js").Picture[]} */
  #pictures = [];
  #text = h("textarea", { rows: 1, placeholder: "Ask something", "aria-label": "Message", autocomplete: "off" });
  #model = h("select", { "aria-label": "Model" });
  #send = h("button", { class: "main" }, "Send");
  #file = h("input", {
    type: "file",
    accept: "image/png,image/jpeg,image/webp,image/gif",
    multiple: true,
    class: "unseen",
    tabindex: -1,
  });
  #attach = button("Attach pictures", () => this.#file.click(), { class: "quiet", hidden: true });
  #attached = h("div", { class: "attached" });
  #note = h("p", { class: "note", role: "status" });
  #busy = false;
  #models = [];
  #acts;

  /** @param {{send: (text: string, pictures: object[]) => void, stop: () => void, pickModel: (id: string) => void, settings: HTMLElement}} acts */
  constructor(acts) {
    this.#acts = acts;
    this.#text.addEventListener("keydown", (event) => this.#onKey(event));
    this.#text.addEventListener("input", () => this.#grow());
    this.#text.addEventListener("paste", (event) => this.#onPaste(event));
    this.#file.addEventListener("change", () => this.#take([...this.#file.files]));
    this.#file.setAttribute("aria-hidden", "true");
    this.#model.addEventListener("change", () => {
      this.#showAttach();
      acts.pickModel(this.#model.value);
    });
    const row = h("div", { class: "row" }, this.#model, acts.settings, this.#attach, this.#file, this.#send);
    const onsubmit = (event) => {
      event.preventDefault();
      this.#act();
    };
    this.element = h(
      "form",
      { class: "composer", onsubmit, "aria-label": "Ask" },
      this.#attached,
      this.#text,
      row,
      this.#note,
    );
  }

  focus() {
    this.#text.focus();
  }

  /** @param {import("./server.js").Model[]} models */
  setModels(models, chosen) {
    this.#models = models;
    this.#model.replaceChildren(...models.map(({ id }) => h("option", { value: id, selected: id === chosen }, id)));
    this.#model.disabled = models.length === 0;
    if (!models.length) this.#model.append(h("option", {}, "no model is served"));
    this.#showAttach();
  }

  /** Choose a model, as a conversation remembers it; one that is gone leaves the choice as it is. */
  setModel(id) {
    if (this.#models.some((model) => model.id === id)) this.#model.value = id;
    this.#showAttach();
  }

  get model() {
    return this.#models.length ? this.#model.value : "";
  }

  set busy(busy) {
    this.#busy = busy;
    setText(this.#send, busy ? "Stop" : "Send");
  }

  /** Give back what could not be sent. */
  restore(text) {
    if (!this.#text.value) this.#text.value = text;
    this.#grow();
  }

  #act() {
    if (this.#busy) {
      this.#acts.stop();
      return;
    }
    const text = this.#text.value.trim();
    if (!text && !this.#pictures.length) return;
    if (!this.model) {
      setText(this.#note, "No model is served yet. Fleet shows how far it is.");
      return;
    }
    setText(this.#note, "");
    const pictures = this.#pictures;
    this.#pictures = [];
    this.#text.value = "";
    this.#grow();
    this.#showAttached();
    this.#acts.send(text, pictures);
  }

  #onKey(event) {
    if (event.key === "Escape" && this.#busy) this.#acts.stop();
    else if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      if (!this.#busy) this.#act();
    } else return;
    event.preventDefault();
  }

  #grow() {
    this.#text.style.height = "auto";
    this.#text.style.height = `${Math.min(this.#text.scrollHeight, 320)}px`;
  }

  get #takesPictures() {
    return this.#models.find((model) => model.id === this.#model.value)?.pictures ?? false;
  }

  #showAttach() {
    setShown(this.#attach, this.#takesPictures);
    if (!this.#takesPictures && this.#pictures.length) {
      this.#pictures = [];
      this.#showAttached();
    }
  }

  #onPaste(event) {
    const files = [...(event.clipboardData?.files ?? [])];
    if (!files.length || !this.#takesPictures) return;
    event.preventDefault();
    this.#take(files);
  }

  async #take(files) {
    for (const file of files) {
      try {
        this.#pictures.push(await readPicture(file));
        setText(this.#note, "");
      } catch (error) {
        setText(this.#note, error.message);
      }
    }
    this.#file.value = "";
    this.#showAttached();
    this.#text.focus();
  }

  #showAttached() {
    const thumbs = this.#pictures.map((picture) => {
      const drop = () => {
        this.#pictures = this.#pictures.filter((one) => one !== picture);
        this.#showAttached();
        this.#text.focus();
      };
      return h(
        "span",
        {},
        h("img", { src: picture.data, alt: picture.name }),
        button("Remove", drop, { class: "quiet", "aria-label": `Remove ${picture.name}` }),
      );
    });
    this.#attached.replaceChildren(...thumbs);
  }
}
