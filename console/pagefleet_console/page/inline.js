// The inside of a paragraph: emphasis, code, links, breaks. One pass with a short stack, so that no text takes long.

/**
 * @typedef {string | {type: "em" | "strong" | "del", children: Inline[]} | {type: "code", text: string} |
 *   {type: "link", href: string, children: Inline[]} | {type: "break"}} Inline
 */

const MAX_OPEN = 16;
const MAX_RUN = 6;
const MAX_TEXT = 100_000;
const MAX_ADDRESS = 2048;
const PLAIN = /[^\\`*_~[\]!<&h\n]+/y;
const ADDRESS_START = /https?:\/\/(?=[^\s<>"'`\\])/y;
const UNBROKEN = /[^\s<>"'`\\]+/y;
const SENTENCE_END = ".,;:!?*_~]";
const ANGLED = /<((?:https?:\/\/|mailto:)[^\s<>]+)>/iy;
const LINE_BREAK = /<br[ \t]*\/?>/iy;
const ENTITY = /&(?:amp|lt|gt|quot|apos|nbsp|#39);/y;
const ENTITIES = { amp: "&", lt: "<", gt: ">", quot: '"', apos: "'", nbsp: "\u00a0", "#39": "'" };
const PUNCTUATION = /[!-/:-@[-`{-~]/;
const WORD = /[\p{L}\p{N}]/u;
const SPACE = /\s/;
const SCHEMES = new Set(["http:", "https:", "mailto:"]);

/** Return the address that a link may have, or null: http, https and mailto alone, and nothing relative. */
export function safeAddress(text) {
  let url;
  try {
    url = new URL(text);
  } catch {
    return null;
  }
  return SCHEMES.has(url.protocol) && text.length <= MAX_ADDRESS ? url.href : null;
}

/** @returns {Inline[]} */
export function inlineOf(text) {
  return text.length > MAX_TEXT ? [text] : new Scanner(text).read();
}

/** What is open, the outermost first: emphasis or a bracket, with what stands in it. The first is the paragraph. */
class Scanner {
  #text;
  #at = 0;
  #unbrokenEnd = 0; // of the run in which the last address began, so that addresses in it don't read it again
  #open = [{ mark: "", count: 0, active: false, children: [] }];
  /** Where runs of so many backticks begin, ascending. @type {Map<number, number[]>} */
  #ticks = new Map();

  constructor(text) {
    this.#text = text;
    for (const run of text.matchAll(/`+/g)) {
      const length = run[0].length;
      if (!this.#ticks.has(length)) this.#ticks.set(length, []);
      this.#ticks.get(length).push(run.index);
    }
    for (const places of this.#ticks.values()) places.reverse(); // the next one is the last, and is popped
  }

  read() {
    while (this.#at < this.#text.length) this.#step(this.#text[this.#at]);
    this.#closeDownTo(0);
    return this.#open[0].children;
  }

  #step(char) {
    if (char === "\\") return this.#escape();
    if (char === "`") return this.#code();
    if (char === "*" || char === "_" || char === "~") return this.#emphasis(char);
    if (char === "[") return this.#bracket("[", 1);
    if (char === "!" && this.#text[this.#at + 1] === "[") return this.#bracket("![", 2);
    if (char === "]") return this.#closeBracket();
    if (char === "\n") return this.#break();
    if (char === "<" && this.#angled()) return undefined;
    if (char === "&" && this.#entity()) return undefined;
    if (char === "h" && this.#bareAddress()) return undefined;
    const plain = this.#match(PLAIN);
    this.#add(plain ? plain[0] : char);
    this.#at += plain ? plain[0].length : 1;
    return undefined;
  }

  #match(pattern) {
    pattern.lastIndex = this.#at;
    return pattern.exec(this.#text);
  }

  #add(node) {
    const { children } = this.#open.at(-1);
    if (typeof node === "string" && typeof children.at(-1) === "string") children.push(children.pop() + node);
    else if (node !== "") children.push(node);
  }

  #escape() {
    const next = this.#text[this.#at + 1];
    if (next === "\n") {
      this.#at += 1;
      return this.#break();
    }
    const escapes = next !== undefined && PUNCTUATION.test(next);
    this.#add(escapes ? next : "\\");
    this.#at += escapes ? 2 : 1;
    return undefined;
  }

  #break() {
    this.#add({ type: "break" });
    this.#at += 1;
  }

  #code() {
    let end = this.#at;
    while (this.#text[end] === "`") end += 1;
    const length = end - this.#at;
    const places = this.#ticks.get(length) ?? [];
    while (places.length && places.at(-1) < end) places.pop();
    if (!places.length) {
      this.#add(this.#text.slice(this.#at, end));
      this.#at = end;
      return;
    }
    const inner = this.#text.slice(end, places.at(-1)).replaceAll("\n", " ");
    const padded = inner.startsWith(" ") && inner.endsWith(" ") && inner.trim() !== "";
    this.#add({ type: "code", text: padded ? inner.slice(1, -1) : inner });
    this.#at = places.at(-1) + length;
  }

  #angled() {
    if (this.#match(LINE_BREAK)) {
      this.#add({ type: "break" });
      this.#at = LINE_BREAK.lastIndex;
      return true;
    }
    const found = this.#match(ANGLED);
    const href = found && safeAddress(found[1]);
    if (!href) return false;
    this.#add({ type: "link", href, children: [found[1]] });
    this.#at += found[0].length;
    return true;
  }

  #entity() {
    const found = this.#match(ENTITY);
    if (!found) return false;
    this.#add(ENTITIES[found[0].slice(1, -1)]);
    this.#at += found[0].length;
    return true;
  }

  #bareAddress() {
    const before = this.#text[this.#at - 1] ?? " ";
    if (WORD.test(before) || this.#open.some((one) => one.mark.endsWith("["))) return false;
    if (!this.#match(ADDRESS_START)) return false;
    if (this.#at >= this.#unbrokenEnd) this.#unbrokenEnd = this.#at + this.#match(UNBROKEN)[0].length;
    if (this.#unbrokenEnd - this.#at > MAX_ADDRESS) return false;
    const found = this.#text.slice(this.#at, this.#unbrokenEnd);
    const shown = withoutForeignParentheses(withoutSentenceEnd(found));
    const href = safeAddress(shown);
    if (!href) return false;
    this.#add({ type: "link", href, children: [shown] });
    this.#at += shown.length;
    return true;
  }

  #emphasis(char) {
    let end = this.#at;
    while (this.#text[end] === char) end += 1;
    let count = end - this.#at;
    const [opens, closes] = flanks(char, this.#text[this.#at - 1] ?? " ", this.#text[end] ?? " ");
    this.#at = end;
    if (count > MAX_RUN || (char === "~" && count > 2)) return this.#add(char.repeat(count));
    if (closes) count = this.#closeEmphasis(char, count, opens);
    if (!count) return undefined;
    if (opens && this.#open.length < MAX_OPEN) {
      return void this.#open.push({ mark: char, count, both: closes, length: count, active: true, children: [] });
    }
    return this.#add(char.repeat(count));
  }

  /** Close what a run of marks closes; returns how many marks are left. */
  #closeEmphasis(char, length, opens) {
    let count = length;
    while (count) {
      const index = this.#open.findLastIndex((one) => one.mark === char && fits(one, char, length, count, opens));
      if (index < 0) break;
      this.#closeDownTo(index);
      const opener = this.#open[index];
      const used = char === "~" ? count : Math.min(2, count, opener.count);
      const node = { type: char === "~" ? "del" : used === 2 ? "strong" : "em", children: opener.children };
      opener.count -= used;
      count -= used;
      if (opener.count) opener.children = [node];
      else {
        this.#open.pop();
        this.#add(node);
      }
    }
    return count;
  }

  #bracket(mark, width) {
    if (this.#open.length < MAX_OPEN) this.#open.push({ mark, count: 1, active: true, children: [] });
    else this.#add(mark);
    this.#at += width;
  }

  #closeBracket() {
    this.#at += 1;
    const index = this.#open.findLastIndex((one) => one.mark.endsWith("["));
    if (index < 0) return this.#add("]");
    this.#closeDownTo(index);
    const opener = this.#open[index];
    const target = opener.active ? destination(this.#text, this.#at) : null;
    const href = target && safeAddress(target.address);
    if (!href) {
      this.#closeDownTo(index - 1);
      return this.#add("]");
    }
    this.#open.pop();
    this.#at = target.end;
    // A picture of another host is never loaded: who wants it follows the link.
    const children =
      opener.mark === "![" ? ["Picture: ", ...(opener.children.length ? opener.children : [href])] : opener.children;
    this.#add({ type: "link", href, children });
    for (const one of this.#open) if (one.mark === "[") one.active = false; // no link in a link
    return undefined;
  }

  /** Make text of the marks above an index that nothing closed. */
  #closeDownTo(index) {
    while (this.#open.length - 1 > index) {
      const { mark, count, children } = this.#open.pop();
      this.#add(mark.repeat(count));
      for (const child of children) this.#add(child);
    }
  }
}

/** Say whether a run of marks may open and may close, by what stands beside it (CommonMark's flanking runs). */
function flanks(char, before, after) {
  const left = !SPACE.test(after) && (WORD.test(after) || !PUNCTUATION.test(after) || !WORD.test(before));
  const right = !SPACE.test(before) && (WORD.test(before) || !PUNCTUATION.test(before) || !WORD.test(after));
  if (char !== "_") return [left, right];
  return [left && (!right || !WORD.test(before)), right && (!left || !WORD.test(after))];
}

function fits(opener, char, length, count, opens) {
  if (char === "~") return opener.count === count;
  const ambiguous = (opener.both || opens) && (opener.length + length) % 3 === 0;
  return !ambiguous || (opener.length % 3 === 0 && length % 3 === 0);
}

function withoutSentenceEnd(address) {
  let end = address.length;
  while (SENTENCE_END.includes(address[end - 1])) end -= 1;
  return address.slice(0, end);
}

/** Take off closing parentheses at the end that nothing in the address opens: they are the sentence's. */
function withoutForeignParentheses(text) {
  let surplus = 0;
  for (const char of text) surplus += char === ")" ? 1 : char === "(" ? -1 : 0;
  let end = text.length;
  while (surplus > 0 && text[end - 1] === ")") {
    end -= 1;
    surplus -= 1;
  }
  return text.slice(0, end);
}

/** Read `(address "title")` behind a bracket. @returns {{address: string, end: number} | null} */
function destination(text, at) {
  if (text[at] !== "(") return null;
  const angled = /\(\s*<([^<>\n]{0,2048})>\s*\)/y;
  angled.lastIndex = at;
  const inAngles = angled.exec(text);
  if (inAngles) return { address: inAngles[1], end: at + inAngles[0].length };
  let depth = 1;
  let end = at + 1;
  for (; end < text.length && end - at < 2100 && depth; end += 1) {
    if (text[end] === "(") depth += 1;
    else if (text[end] === ")") depth -= 1;
    else if (text[end] === "\n") return null;
  }
  if (depth) return null;
  const inner = text.slice(at + 1, end - 1).trim();
  return { address: withoutTitle(inner), end };
}

function withoutTitle(text) {
  const quote = text.at(-1);
  if (quote !== '"' && quote !== "'") return text;
  const opening = text.lastIndexOf(quote, text.length - 2);
  return opening > 0 && SPACE.test(text[opening - 1]) ? text.slice(0, opening).trimEnd() : text;
}
