import { safeAddress } from "/console/inline.js";
import { MAX_DEPTH, parseGrowing, parseMarkdown } from "/console/markdown.js";
import { equal } from "./check.js";

const inline = (text) => parseMarkdown(text)[0].inline;
const em = (...children) => ({ type: "em", children });
const strong = (...children) => ({ type: "strong", children });
const link = (href, ...children) => ({ type: "link", href, children });

export function emphasis() {
  equal(inline("a *b* **c *d* e** ***f***"), ["a ", em("b"), " ", strong("c ", em("d"), " e"), " ", em(strong("f"))]);
  equal(inline("snake_case_name 2 * 3 * 4 *open"), ["snake_case_name 2 * 3 * 4 *open"]);
  equal(inline("~~gone~~ and \\*kept\\*"), [{ type: "del", children: ["gone"] }, " and *kept*"]);
}

export function code_is_not_read_further() {
  equal(inline("`a *b*` ``c ` d``"), [{ type: "code", text: "a *b*" }, " ", { type: "code", text: "c ` d" }]);
  equal(inline("`open *b*"), ["`open ", em("b")]);
}

export function links_are_of_three_schemes() {
  equal(inline('[a](https://b.example/c_(d) "title")'), [link("https://b.example/c_(d)", "a")]);
  equal(inline("see https://a.example/b."), ["see ", link("https://a.example/b", "https://a.example/b"), "."]);
  equal(inline("[a](javascript:alert)"), ["[a](javascript:alert)"]);
  for (const bad of [
    "javascript:x",
    "java\nscript:x",
    "data:text/html,x",
    "//host/x",
    "/path",
    "x",
    "file:///x",
    "ftp://x",
    "",
  ]) {
    equal(safeAddress(bad), null, bad);
  }
  for (const good of ["https://a.example/", "http://a.example/", "mailto:a@b.example"]) equal(safeAddress(good), good);
}

export function pictures_are_links() {
  equal(inline("![alt](https://a.example/p.png)"), [link("https://a.example/p.png", "Picture: ", "alt")]);
}

export function blocks() {
  equal(
    parseMarkdown("# A #\n\ntext\nmore\n\n***\nB\n===").map((block) => block.type),
    ["heading", "paragraph", "rule", "heading"],
  );
  equal(parseMarkdown("```py x\na\n  b\n```\nc")[0], { type: "code", language: "py", text: "a\n  b", open: false });
  equal(parseMarkdown("```\nopen")[0].open, true);
  equal(
    parseMarkdown("> a\nb\n\nc").map((block) => block.type),
    ["quote", "paragraph"],
  );
}

export function lists() {
  const [list] = parseMarkdown("3. a\n4. b\n   - c\n\n     d\n5. e");
  equal([list.ordered, list.start, list.tight, list.items.length], [true, 3, true, 3]);
  equal(list.items[1].blocks[1].items[0].blocks.length, 2);
  equal(
    parseMarkdown("- [x] done\n- [ ] to do")[0].items.map((item) => item.done),
    [true, false],
  );
  equal(parseMarkdown("- a\n\n- b")[0].tight, false);
}

export function tables() {
  const [table] = parseMarkdown("| a | b |\n|:--|--:|\n| 1 \\| 2 | 3 |\n| short |\n\nafter");
  equal(table.align, ["left", "right"]);
  equal(table.rows, [
    [["1 | 2"], ["3"]],
    [["short"], []],
  ]);
}

export function html_is_text() {
  equal(inline("<b onclick=x>a</b> &lt; &amp;"), ["<b onclick=x>a</b> < &"]);
}

export function nesting_ends() {
  let depth = 0;
  for (let block = parseMarkdown(">".repeat(1000) + "x")[0]; block?.blocks; block = block.blocks[0]) depth += 1;
  equal(depth, MAX_DEPTH);
}

const SAMPLE =
  "abc\n#7 x\n\n***\n***b***\n- a\n  - b\n\n  c\n\n1. x\n2. y\n\n> q\n> r\nz\n| a | b |\n|--|--|\n| 1 | 2 |\nend\n\n```py\nx\n```\nT\n---\n    code\n\n    more\r\n";

export function what_grows_ends_as_the_whole() {
  let settled = 0;
  let kept = [];
  for (let end = 0; end <= SAMPLE.length; end += 1) {
    const found = parseGrowing(SAMPLE.slice(settled, end));
    equal([...kept, ...found.blocks], parseMarkdown(SAMPLE.slice(0, end)), `the first ${end} characters`);
    kept = [...kept, ...found.blocks.slice(0, found.kept)];
    settled += found.settled;
  }
}

const milliseconds = (text) => {
  const began = performance.now();
  parseMarkdown(Array(4).fill(text).join("\n\n"));
  return Math.round(performance.now() - began);
};

// Nothing counts an engine's steps, so the clock must do: most of these texts took 4 to 20 s while their time grew with
// the square of their length, and take milliseconds now.
const SLOWEST = 3000; // milliseconds
const TIMES_HARMLESS = 100; // of harmless text of the same length: where others want the machine too, both take longer
const TRIES = 5; // the least counts: a busy machine may stand still for seconds, which says nothing
const HOSTILE = {
  dots_in_an_address: (count) => `https://x${".".repeat(count)}a`,
  addresses_in_an_address: (count) => "http://".repeat(count / 7),
  false_addresses: (count) => "http://%*".repeat(count / 9),
  short_false_addresses: (count) => `${"http://%*".repeat(225)} `.repeat(count / 2026),
  addresses_in_a_bracket: (count) => `[${"http://".repeat(count / 7)}`,
  blanks_in_links: (count) => `${"[](".repeat(300)}${" ".repeat(900)}x${")".repeat(300)}\n`.repeat(count / 2100),
  blanks_behind_a_fence: (count) => `\`\`\`${" ".repeat(count)}\``,
  a_fence_of_tildes: (count) => `${"~".repeat(count)}\``,
  blanks_in_a_heading: (count) => `# a${" ".repeat(count)}b`,
  blanks_in_a_table: (count) => `a|b\n-${" ".repeat(count)}x`,
};

export function time_grows_with_the_length() {
  for (const [name, text] of Object.entries(HOSTILE)) {
    for (const count of [20_000, 40_000, 90_000]) {
      let took = 0;
      let most = 0;
      for (let tries = 0; tries < TRIES && took >= most; tries += 1) {
        most = Math.max(SLOWEST, TIMES_HARMLESS * milliseconds("a *word* and ".repeat(count / 13)));
        took = milliseconds(text(count));
      }
      equal(took < most, true, `${name} of ${count} characters: ${took} of ${most} ms`);
    }
  }
}

export function what_is_no_address_is_text() {
  const long = `https://a.example/${"x".repeat(2100)}`;
  equal(inline(`see ${long} there`), [`see ${long} there`]);
  equal(inline("(**http://host:port**)"), ["(", strong("http://host:port"), ")"]);
  equal(inline("(see https://a.example/b_(c))..."), [
    "(see ",
    link("https://a.example/b_(c)", "https://a.example/b_(c)"),
    ")...",
  ]);
}

export function titles_are_left_out() {
  for (const title of ["", ' "one two"', "  'one'"]) {
    equal(inline(`[a](https://a.example/${title})`), [link("https://a.example/", "a")]);
  }
  equal(inline('[a](https://a.example/"b")')[0].href, "https://a.example/%22b%22");
}

export function delimiters_of_tables() {
  for (const row of ["-|-", "|-|-|  ", "  | :-- | --: |", "-|-\t"]) {
    equal(parseMarkdown(`a|b\n${row}`)[0].type, "table", row);
  }
  for (const row of ["-|x", "-||-", "- -|-", "|--"]) {
    equal(parseMarkdown(`a|b\n${row}`)[0].type, "paragraph", row);
  }
}
