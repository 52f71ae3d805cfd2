// K/V between engines: who computes prompts for whom, as lines whose width is what flows.

import { h, keepChildren, setShown, setText, svg } from "./dom.js";
import { bytes, count } from "./format.js";

const MOST = 24;
const WIDTH = 560;
const ROW = 22;
const SIDE = 150;

/** A picture of the busiest pairs, and a table of all that it shows. */
export class Flows {
  element;
  #picture = svg("svg", { class: "flows", "aria-hidden": "true" });
  #body = h("tbody");
  #more = h("p", { class: "note" });

  constructor() {
    const heads = ["From", "To", "K/V", "Transfers/s", "Transfers"].map((text, index) =>
      h("th", { scope: "col", class: index > 1 ? "figure" : null }, text),
    );
    const table = h("table", { class: "figures" }, h("thead", {}, h("tr", {}, ...heads)), this.#body);
    const region = h("div", { class: "wide", tabindex: 0, role: "region", "aria-label": "K/V between engines" }, table);
    this.element = h(
      "section",
      { class: "card", hidden: true, "aria-labelledby": "flows-title" },
      h("h2", { id: "flows-title" }, "K/V between engines"),
      this.#picture,
      region,
      this.#more,
    );
  }

  update(pairs) {
    setShown(this.element, pairs.length > 0);
    const busiest = [...pairs].sort((a, b) => b.bytes_s - a.bytes_s || b.transfers - a.transfers).slice(0, MOST);
    setText(this.#more, pairs.length > MOST ? `The busiest ${MOST} of ${pairs.length} pairs.` : "");
    this.#draw(busiest);
    const make = () =>
      h("tr", {}, h("th", { scope: "row" }), h("td"), ...[0, 1, 2].map(() => h("td", { class: "figure" })));
    keepChildren(
      this.#body,
      busiest,
      (one) => `${one.source} ${one.target}`,
      make,
      (row, one) => {
        const texts = [one.source, one.target, `${bytes(one.bytes_s)}/s`, count(one.transfers_s), count(one.transfers)];
        for (const [index, text] of texts.entries()) setText(row.children[index], text);
      },
    );
  }

  #draw(pairs) {
    const sources = [...new Set(pairs.map((one) => one.source))].sort();
    const targets = [...new Set(pairs.map((one) => one.target))].sort();
    const height = Math.max(sources.length, targets.length, 1) * ROW;
    this.#picture.setAttribute("viewBox", `0 0 ${WIDTH} ${height}`);
    const place = (names, name) => ((names.indexOf(name) + 0.5) * height) / names.length;
    const most = Math.max(...pairs.map((one) => one.bytes_s), 1);
    const lines = pairs.map((one) => {
      const [from, to] = [place(sources, one.source), place(targets, one.target)];
      const path = `M${SIDE} ${from} C${WIDTH / 2} ${from} ${WIDTH / 2} ${to} ${WIDTH - SIDE} ${to}`;
      const width = one.bytes_s ? 1 + 7 * Math.sqrt(one.bytes_s / most) : 1;
      return svg("path", { d: path, "stroke-width": width.toFixed(1), class: one.bytes_s ? "flow" : "flow idle" });
    });
    const label = (names, x, anchor) => (name) =>
      svg("text", { x, y: place(names, name) + 4, "text-anchor": anchor }, shortened(name));
    this.#picture.replaceChildren(
      ...lines,
      ...sources.map(label(sources, SIDE - 8, "end")),
      ...targets.map(label(targets, WIDTH - SIDE + 8, "start")),
    );
  }
}

const shortened = (name) => (name.length > 20 ? `…${name.slice(-19)}` : name);
