// From Markdown's tree to elements. The names below are all that a model's text can become.

import { button, copyText, h } from "./dom.js";
import { highlight } from "./highlight.js";
import { parseGrowing } from "./markdown.js";

const MAX_TEXT = 200_000;
const MAX_ROWS = 500;

const INLINE = { em: "em", strong: "strong", del: "del" };

/** Shows a Markdown text that grows: what is settled stays as it is, the last block is made anew. */
export class MarkdownView {
  element = h("div", { class: "prose" });
  #text = "";
  #settled = 0;
  /** The elements behind this one are those of what is not settled. */
  #kept = 0;

  /** @param {string} text */
  update(text) {
    if (text === this.#text) return;
    if (!text.startsWith(this.#text)) this.#restart();
    this.#text = text;
    const shown = text.slice(this.#settled, MAX_TEXT);
    const { blocks, settled, kept } = parseGrowing(shown);
    while (this.element.childElementCount > this.#kept) this.element.lastElementChild.remove();
    this.element.append(...blocks.map(blockElement));
    this.#settled += settled;
    this.#kept += kept;
    if (text.length > MAX_TEXT) this.element.append(cutNotice(text));
  }

  #restart() {
    this.element.replaceChildren();
    this.#settled = 0;
    this.#kept = 0;
  }
}

function cutNotice(text) {
  const size = Math.ceil((text.length - MAX_TEXT) / 1000);
  const copy = button("Copy all of it", () => copyText(text, copy));
  return h("p", { class: "note" }, `${size} k characters more are not shown. `, copy);
}

/** @param {import("./markdown.js").Block} block */
function blockElement(block) {
  switch (block.type) {
    case "heading":
      // The page's own headings are two levels above a model's.
      return h(`h${Math.min(6, block.level + 2)}`, {}, ...block.inline.map(inlineNode));
    case "code":
      return codeElement(block);
    case "quote":
      return h("blockquote", {}, ...block.blocks.map(blockElement));
    case "list":
      return listElement(block);
    case "table":
      return tableElement(block);
    case "rule":
      return h("hr");
    default:
      return h("p", {}, ...block.inline.map(inlineNode));
  }
}

function inlineNode(node) {
  if (typeof node === "string") return node;
  if (node.type === "break") return h("br");
  if (node.type === "code") return h("code", {}, node.text);
  const children = node.children.map(inlineNode);
  if (node.type === "link") {
    return h("a", { href: node.href, rel: "noopener noreferrer", target: "_blank", title: node.href }, ...children);
  }
  return h(INLINE[node.type], {}, ...children);
}

function listElement({ ordered, start, tight, items }) {
  const children = items.map(({ done, blocks }) => {
    const nodes = blocks.flatMap((block) =>
      tight && block.type === "paragraph" ? block.inline.map(inlineNode) : [blockElement(block)],
    );
    if (done === null) return h("li", {}, ...nodes);
    const box = h("input", { type: "checkbox", disabled: true, checked: done, "aria-label": done ? "done" : "to do" });
    return h("li", { class: "task" }, box, " ", ...nodes);
  });
  return ordered ? h("ol", { start: start === 1 ? null : start }, ...children) : h("ul", {}, ...children);
}

function tableElement({ align, head, rows }) {
  const cell = (name) => (inline, column) => h(name, { class: align[column] || null }, ...inline.map(inlineNode));
  const row = (name, cells) => h("tr", {}, ...cells.map(cell(name)));
  const shown = rows.slice(0, MAX_ROWS).map((cells) => row("td", cells));
  const table = h("table", {}, h("thead", {}, row("th", head)), h("tbody", {}, ...shown));
  const cut =
    rows.length > MAX_ROWS ? h("p", { class: "note" }, `${rows.length - MAX_ROWS} rows more are not shown.`) : null;
  return h("div", { class: "wide", tabindex: 0, role: "region", "aria-label": "Table" }, table, cut);
}

function codeElement({ language, text, open }) {
  const copy = button("Copy", () => copyText(text, copy), { class: "quiet", "aria-label": "Copy this code" });
  // Code that still grows is coloured once it is whole.
  const spans = open ? [["", text]] : highlight(text, language);
  const code = h("code", {}, ...spans.map(([kind, part]) => (kind ? h("span", { class: `hl-${kind}` }, part) : part)));
  const pre = h("pre", { tabindex: 0, role: "region", "aria-label": language ? `Code in ${language}` : "Code" }, code);
  return h("figure", { class: "code" }, h("figcaption", {}, h("span", {}, language || "text"), copy), pre);
}
