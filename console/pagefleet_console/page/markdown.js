// Markdown to a tree of blocks: what models write of CommonMark and GitHub's tables. Time grows with the text's length,
// nesting ends at MAX_DEPTH, and HTML is text. The tree names only what render.js has an element for.

import { inlineOf } from "./inline.js";

/**
 * @typedef {import("./inline.js").Inline} Inline
 * @typedef {{type: "paragraph", inline: Inline[]} | {type: "heading", level: number, inline: Inline[]} |
 *   {type: "code", language: string, text: string, open: boolean} | {type: "quote", blocks: Block[]} |
 *   {type: "list", ordered: boolean, start: number, tight: boolean, items: {done: boolean | null, blocks: Block[]}[]} |
 *   {type: "table", align: ("" | "left" | "center" | "right")[], head: Inline[][], rows: Inline[][][]} |
 *   {type: "rule"}} Block
 */

export const MAX_DEPTH = 12;
const MAX_COLUMNS = 64;

// Two quantifiers side by side never take the same character: a line that does not fit is refused in one pass.
const BLANK = /^[ \t]*$/;
const FENCE = /^( {0,3})(`{3,}|~{3,}(?!~))([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})(?:[ \t]+|$)/;
const RULE = /^ {0,3}(?:(?:\*[ \t]*){3,}|(?:-[ \t]*){3,}|(?:_[ \t]*){3,})$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( {0,3})([-*+]|\d{1,9}[.)])(?:([ \t]+)|$)/;
const INDENTED = /^(?: {4}|\t)/;
const DELIMITERS = /^ {0,3}\|?[ \t]*:?-+:?[ \t]*(?:\|[ \t]*:?-+:?[ \t]*)*\|?$/; // of a line without blanks at its end
const UNDERLINE = /^ {0,3}(=+|-+)[ \t]*$/;

/** @returns {Block[]} */
export function parseMarkdown(text) {
  return blocksOf(linesOf(text), 0).map(({ block }) => block);
}

/**
 * Parse what may still grow.
 * @returns {{blocks: Block[], settled: number, kept: number}}  kept: how many blocks no appended text can change;
 *   settled: the length of their text
 */
export function parseGrowing(text) {
  const lines = linesOf(text);
  const found = blocksOf(lines, 0);
  // A last line that is not whole may yet belong to the block before it: "#" begins a heading, "#7 is" a sentence.
  let kept = Math.max(0, found.length - 1);
  if (kept && found[kept].line === lines.length - 1) kept -= 1;
  let settled = 0;
  for (let line = 0; line < (found[kept]?.line ?? 0); line += 1) settled += lines[line].length + 1;
  return { blocks: found.map(({ block }) => block), settled, kept };
}

/** A return at the end of a line becomes a space, so that a text's length and its lines' agree. */
const linesOf = (text) => text.split("\n").map((line) => (line.endsWith("\r") ? `${line.slice(0, -1)} ` : line));

/** Read lines to the end; each block with the number of its first line. */
function blocksOf(lines, depth) {
  const found = [];
  for (let at = 0; at < lines.length;) {
    if (BLANK.test(lines[at])) {
      at += 1;
      continue;
    }
    const [block, next] = blockAt(lines, at, depth);
    found.push({ block, line: at });
    at = next;
  }
  return found;
}

/** @returns {[Block, number]} a block, and the first line behind it */
function blockAt(lines, at, depth) {
  const line = lines[at];
  const fence = FENCE.exec(line);
  if (fence) return fenced(lines, at, fence);
  if (INDENTED.test(line)) return indented(lines, at);
  const heading = HEADING.exec(line);
  if (heading) {
    const text = line.slice(heading[0].length).trimEnd();
    return [{ type: "heading", level: heading[1].length, inline: inlineOf(withoutClosing(text)) }, at + 1];
  }
  if (RULE.test(line)) return [{ type: "rule" }, at + 1];
  if (depth < MAX_DEPTH) {
    if (QUOTE.test(line)) return quote(lines, at, depth);
    if (ITEM.test(line)) return list(lines, at, depth);
  }
  if (isTable(lines, at)) return table(lines, at);
  return paragraph(lines, at, depth);
}

function withoutClosing(text) {
  let end = text.length;
  while (end > 0 && text[end - 1] === "#") end -= 1;
  return end === 0 || text[end - 1] === " " || text[end - 1] === "\t" ? text.slice(0, end).trimEnd() : text;
}

function fenced(lines, at, [, indent, marks, info]) {
  const body = [];
  let next = at + 1;
  const open = () => next >= lines.length;
  for (; !open(); next += 1) {
    const closing = /^ {0,3}(`{3,}|~{3,})[ \t]*$/.exec(lines[next]);
    if (closing && closing[1][0] === marks[0] && closing[1].length >= marks.length) break;
    let cut = 0;
    while (cut < indent.length && lines[next][cut] === " ") cut += 1;
    body.push(lines[next].slice(cut));
  }
  const language = info
    .trim()
    .split(/\s/, 1)[0]
    .toLowerCase()
    .replace(/[^\w+#.-]/g, "")
    .slice(0, 24);
  return [{ type: "code", language, text: body.join("\n"), open: open() }, Math.min(next + 1, lines.length)];
}

function indented(lines, at) {
  let next = at;
  while (next < lines.length && (INDENTED.test(lines[next]) || BLANK.test(lines[next]))) next += 1;
  while (BLANK.test(lines[next - 1])) next -= 1;
  const text = lines
    .slice(at, next)
    .map((line) => line.replace(INDENTED, ""))
    .join("\n");
  return [{ type: "code", language: "", text, open: false }, next];
}

function quote(lines, at, depth) {
  const body = [];
  let next = at;
  for (; next < lines.length; next += 1) {
    const line = lines[next];
    if (QUOTE.test(line)) body.push(line.replace(QUOTE, ""));
    else if (BLANK.test(line) || BLANK.test(body.at(-1)) || interrupts(lines, next)) break;
    else body.push(line); // a paragraph goes on without its mark
  }
  return [{ type: "quote", blocks: blocksOf(body, depth + 1).map(({ block }) => block) }, next];
}

function list(lines, at, depth) {
  const kind = kindOf(ITEM.exec(lines[at])[2]);
  const first = Number.parseInt(ITEM.exec(lines[at])[2], 10);
  const items = [];
  let tight = true;
  let next = at;
  while (next < lines.length) {
    const mark = ITEM.exec(lines[next]);
    if (!mark || kindOf(mark[2]) !== kind || RULE.test(lines[next])) break;
    const [body, end] = itemLines(lines, next, mark);
    const [read, loose] = item(body, depth);
    if (loose) tight = false;
    items.push(read);
    next = end;
    let behind = next;
    while (behind < lines.length && BLANK.test(lines[behind])) behind += 1;
    const another = behind < lines.length ? ITEM.exec(lines[behind]) : null;
    if (behind === next || !another || kindOf(another[2]) !== kind) continue;
    tight = false;
    next = behind;
  }
  return [
    { type: "list", ordered: kind !== "-" && kind !== "*" && kind !== "+", start: first || 0, tight, items },
    next,
  ];
}

const kindOf = (mark) => mark.at(-1);

/** Collect the lines of one item, without their indent. @returns {[string[], number]} */
function itemLines(lines, at, mark) {
  const spaces = mark[3] === undefined ? 1 : mark[3].length > 4 ? 1 : mark[3].length;
  const width = mark[1].length + mark[2].length + spaces;
  const body = [lines[at].slice(Math.min(width, lines[at].length))];
  let next = at + 1;
  for (; next < lines.length; next += 1) {
    const line = lines[next];
    if (BLANK.test(line)) {
      let behind = next;
      while (behind < lines.length && BLANK.test(lines[behind])) behind += 1;
      if (behind === lines.length || indentOf(lines[behind]) < width) break;
      for (; next < behind; next += 1) body.push("");
      next -= 1;
    } else if (indentOf(line) >= width) body.push(dedented(line, width));
    else if (ITEM.test(line) || interrupts(lines, next)) break;
    else body.push(line.trimStart());
  }
  return [body, next];
}

/** Read the inside of an item, and say whether empty lines stand between its blocks. */
function item(body, depth) {
  const task = /^\[([ xX])\][ \t]+/.exec(body[0]);
  if (task) body[0] = body[0].slice(task[0].length);
  const found = blocksOf(body, depth + 1);
  const loose = found.some(({ line }, index) => index > 0 && BLANK.test(body[line - 1]));
  return [{ done: task ? task[1] !== " " : null, blocks: found.map(({ block }) => block) }, loose];
}

function indentOf(line) {
  let width = 0;
  for (const char of line) {
    if (char === " ") width += 1;
    else if (char === "\t") width += 4 - (width % 4);
    else break;
  }
  return width;
}

function dedented(line, width) {
  let cut = 0;
  let seen = 0;
  while (seen < width && (line[cut] === " " || line[cut] === "\t")) {
    seen += line[cut] === " " ? 1 : 4 - (seen % 4);
    cut += 1;
  }
  return " ".repeat(Math.max(0, seen - width)) + line.slice(cut);
}

function isTable(lines, at) {
  if (at + 1 >= lines.length || !lines[at].includes("|") || !lines[at + 1].includes("-")) return false;
  return DELIMITERS.test(lines[at + 1].trimEnd()) && cellsOf(lines[at]).length === cellsOf(lines[at + 1]).length;
}

function table(lines, at) {
  const columns = cellsOf(lines[at]);
  const align = cellsOf(lines[at + 1]).map((cell) => {
    const [left, right] = [cell.startsWith(":"), cell.endsWith(":")];
    return left && right ? "center" : right ? "right" : left ? "left" : "";
  });
  const rows = [];
  let next = at + 2;
  for (; next < lines.length && !BLANK.test(lines[next]) && lines[next].includes("|"); next += 1) {
    const cells = cellsOf(lines[next]);
    rows.push(columns.map((_, column) => inlineOf(cells[column] ?? "")));
  }
  return [{ type: "table", align, head: columns.map((cell) => inlineOf(cell)), rows }, next];
}

function cellsOf(line) {
  const cells = line
    .trim()
    .replace(/^\|/, "")
    .split(/(?<!\\)\|/);
  if (cells.length > 1 && cells.at(-1).trim() === "") cells.pop();
  return cells.slice(0, MAX_COLUMNS).map((cell) => cell.trim().replaceAll("\\|", "|"));
}

function paragraph(lines, at, depth) {
  let next = at + 1;
  for (; next < lines.length && !BLANK.test(lines[next]); next += 1) {
    const under = UNDERLINE.exec(lines[next]);
    if (under) {
      const inline = inlineOf(lines.slice(at, next).join("\n").trim());
      return [{ type: "heading", level: under[1][0] === "=" ? 1 : 2, inline }, next + 1];
    }
    if (depth < MAX_DEPTH && interrupts(lines, next)) break;
  }
  const text = lines
    .slice(at, next)
    .map((line) => line.trimStart())
    .join("\n")
    .trimEnd();
  return [{ type: "paragraph", inline: inlineOf(text) }, next];
}

/** Say whether a line ends a paragraph before it, though no line is empty between them. */
function interrupts(lines, at) {
  const line = lines[at];
  if (FENCE.test(line) || HEADING.test(line) || RULE.test(line) || QUOTE.test(line)) return true;
  const mark = ITEM.exec(line);
  if (mark && mark[3] !== undefined && (mark[2].length === 1 || Number.parseInt(mark[2], 10) === 1)) return true;
  return isTable(lines, at);
}
