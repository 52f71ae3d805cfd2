// Colours for code: comments, strings, numbers and words that a language keeps for itself. One pass, no grammar.

const MAX_TEXT = 60_000;

const words = (text) => new Set(text.split(" "));
const C_COMMENT = String.raw`\/\/[^\n]*|\/\*[^]*?(?:\*\/|$)`;
const HASH_COMMENT = String.raw`#[^\n]*`;
const QUOTED = String.raw`"(?:[^"\\\n]|\\.)*"?|'(?:[^'\\\n]|\\.)*'?`;

const FAMILIES = {
  c: {
    comment: C_COMMENT,
    string: QUOTED,
    words: words(
      "auto bool break case catch char class const constexpr continue default delete do double else enum extends extern false final " +
        "float for fn func goto if impl implements import in inline instanceof int interface let long loop match mod mut namespace " +
        "new nil null nullptr override package private protected pub public range return self short signed sizeof static string " +
        "struct super switch template this throw throws trait true try type typedef typename union unsigned use using var virtual " +
        "void volatile where while map chan defer go select",
    ),
  },
  script: {
    comment: C_COMMENT,
    string: QUOTED + "|`(?:[^`\\\\]|\\\\[^])*`?",
    words: words(
      "as async await break case catch class const continue debugger default delete do else enum export extends false finally for " +
        "from function if implements import in instanceof interface let new null of return static super switch this throw true try " +
        "type typeof undefined var void while yield",
    ),
  },
  python: {
    comment: HASH_COMMENT,
    string: String.raw`"""[^]*?(?:"""|$)|'''[^]*?(?:'''|$)|` + QUOTED,
    words: words(
      "False None True and as assert async await break case class continue def del elif else except finally for from global if " +
        "import in is lambda match nonlocal not or pass raise return self try while with yield",
    ),
  },
  shell: {
    comment: String.raw`(?<![\w$\\])#[^\n]*`,
    string: String.raw`"(?:[^"\\]|\\[^])*"?|'[^']*'?`,
    words: words("case do done elif else esac exit export fi for function if in local return set then until while"),
  },
  data: { comment: HASH_COMMENT, string: QUOTED, words: words("true false null yes no on off") },
  sql: {
    comment: String.raw`--[^\n]*|\/\*[^]*?(?:\*\/|$)`,
    string: String.raw`'(?:[^']|'')*'?|"[^"]*"?`,
    words: words(
      "select from where and or not in is null as join left right inner outer full on group by order having limit offset insert " +
        "into values update set delete create table index view drop alter add primary key foreign references unique distinct union " +
        "all case when then else end exists between like with returning",
    ),
    anyCase: true,
  },
  markup: { comment: String.raw`<!--[^]*?(?:-->|$)`, string: QUOTED, words: new Set(), tags: true },
  diff: { lines: true },
};

const LANGUAGES = {
  c: "c",
  cpp: "c",
  "c++": "c",
  h: "c",
  cs: "c",
  csharp: "c",
  java: "c",
  kotlin: "c",
  swift: "c",
  go: "c",
  rust: "c",
  rs: "c",
  css: "c",
  scala: "c",
  cuda: "c",
  proto: "c",
  js: "script",
  javascript: "script",
  jsx: "script",
  ts: "script",
  typescript: "script",
  tsx: "script",
  mjs: "script",
  py: "python",
  python: "python",
  python3: "python",
  starlark: "python",
  sh: "shell",
  bash: "shell",
  shell: "shell",
  zsh: "shell",
  console: "shell",
  dockerfile: "shell",
  makefile: "shell",
  json: "data",
  json5: "data",
  yaml: "data",
  yml: "data",
  toml: "data",
  ini: "data",
  hcl: "data",
  terraform: "data",
  sql: "sql",
  html: "markup",
  xml: "markup",
  svg: "markup",
  diff: "diff",
  patch: "diff",
};

/**
 * Cut code into spans.
 * @returns {[string, string][]} kind ("", "comment", "string", "number", "word", "added", "removed") and text; the texts
 *   together are the code
 */
export function highlight(code, language) {
  const family = Object.hasOwn(LANGUAGES, language) ? FAMILIES[LANGUAGES[language]] : null;
  if (!family || code.length > MAX_TEXT) return [["", code]];
  return family.lines ? diffSpans(code) : spansOf(code, family);
}

function spansOf(code, family) {
  const pattern = new RegExp(
    `(?<comment>${family.comment})|(?<string>${family.string})|` +
      String.raw`(?<number>(?<![\w.])(?:0[xX][\da-fA-F_]+|\d[\d_]*(?:\.\d+)?(?:[eE][+-]?\d+)?))|(?<tag><\/?[\w-]+)|(?<word>[A-Za-z_]\w*)`,
    "g",
  );
  const spans = [];
  let at = 0;
  for (const found of code.matchAll(pattern)) {
    const kind = kindOf(found, family);
    if (!kind) continue;
    if (found.index > at) spans.push(["", code.slice(at, found.index)]);
    spans.push([kind, found[0]]);
    at = found.index + found[0].length;
  }
  if (at < code.length) spans.push(["", code.slice(at)]);
  return spans;
}

function kindOf({ groups }, family) {
  if (groups.comment !== undefined) return "comment";
  if (groups.string !== undefined) return "string";
  if (groups.number !== undefined) return "number";
  if (groups.tag !== undefined) return family.tags ? "word" : "";
  return family.words.has(family.anyCase ? groups.word.toLowerCase() : groups.word) ? "word" : "";
}

function diffSpans(code) {
  const kinds = { "+": "added", "-": "removed", "@": "comment" };
  return code.split(/(?<=\n)/).map((line) => [kinds[line[0]] ?? "", line]);
}
