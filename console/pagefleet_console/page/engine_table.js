// The engines as a table: a row each, changed in place, so that a hundred of them cost little.

import { button, h, keepChildren, setText, svg } from "./dom.js";
import { UNKNOWN, count, percent, seconds } from "./format.js";
import { sparkPath } from "./series.js";

const SPARK = { width: 72, height: 18 };

/** Title, class, what sorts it, and how a cell shows an engine. */
const COLUMNS = [
  { title: "Engine", by: (one) => one.name },
  { title: "Phase", by: (one) => ["unreachable", "starting", "loading", "draining", "ready"].indexOf(one.phase) },
  { title: "Role", by: (one) => one.role },
  { title: "Revision", by: (one) => one.revision },
  { title: "Running", figure: true, by: (one) => one.running },
  { title: "Waiting", figure: true, by: (one) => one.waiting },
  { title: "Tokens/s", figure: true, by: (one) => one.generated_tokens_s },
  { title: "Prompt/s", figure: true, by: (one) => one.prompt_tokens_s },
  {
    title: "First token",
    figure: true,
    by: (one) => one.ttft?.p95,
    hint: "median and 95th percentile of the last minute",
  },
  { title: "K/V", figure: true, by: (one) => one.kv_usage, hint: "share of the K/V blocks in use" },
  { title: "Hits", figure: true, by: (one) => one.prefix_hit_ratio, hint: "share of prompt tokens found in the cache" },
  { title: "Faults", figure: true, by: (one) => one.faults },
];

/** The table, its order and its filter. */
export class EngineTable {
  element;
  #body = h("tbody");
  #heads;
  #order = { column: 0, down: false };
  #filter = h("input", { type: "search", placeholder: "Filter", "aria-label": "Filter engines", autocomplete: "off" });
  #count = h("span", { class: "note" });
  #engines = [];
  #series;

  /** @param {import("./series.js").Series} series  of generated tokens a second, by engine */
  constructor(series) {
    this.#series = series;
    this.#heads = COLUMNS.map(({ title, figure, hint }, column) => {
      const sorts = button(title, () => this.#sortBy(column), { title: hint ?? null });
      return h("th", { scope: "col", class: figure ? "figure" : null }, sorts);
    });
    const table = h("table", { class: "engines" }, h("thead", {}, h("tr", {}, ...this.#heads)), this.#body);
    this.#filter.addEventListener("input", () => this.#show());
    this.element = h(
      "section",
      { "aria-labelledby": "engines-title" },
      h("div", { class: "head" }, h("h2", { id: "engines-title" }, "Engines"), this.#count, this.#filter),
      h("div", { class: "wide", tabindex: 0, role: "region", "aria-label": "Engines" }, table),
    );
    this.#showOrder();
  }

  update(engines) {
    this.#engines = engines;
    this.#show();
  }

  #sortBy(column) {
    this.#order = { column, down: this.#order.column === column ? !this.#order.down : Boolean(COLUMNS[column].figure) };
    this.#showOrder();
    this.#show();
  }

  #showOrder() {
    const { column, down } = this.#order;
    for (const [index, head] of this.#heads.entries()) {
      if (index === column) head.setAttribute("aria-sort", down ? "descending" : "ascending");
      else head.removeAttribute("aria-sort");
    }
  }

  #show() {
    const wanted = this.#filter.value.trim().toLowerCase();
    const has = (one) =>
      `${one.name} ${one.phase} ${one.role} ${one.revision ?? ""} ${one.model}`.toLowerCase().includes(wanted);
    const shown = sorted(
      this.#engines.filter((one) => !wanted || has(one)),
      this.#order,
    );
    setText(this.#count, wanted ? `${shown.length} of ${this.#engines.length}` : String(this.#engines.length));
    keepChildren(
      this.#body,
      shown,
      (one) => one.name,
      makeRow,
      (row, one) => updateRow(row, one, this.#series.of(one.name)),
    );
  }
}

function sorted(engines, { column, down }) {
  const { by } = COLUMNS[column];
  const compare = (a, b) => {
    const [x, y] = [by(a), by(b)];
    if (x === y || (x == null && y == null)) return a.name.localeCompare(b.name, undefined, { numeric: true });
    if (x == null || y == null) return x == null ? 1 : -1; // what is not known comes last, whatever the order
    const order = typeof x === "string" ? x.localeCompare(y, undefined, { numeric: true }) : x - y;
    return down ? -order : order;
  };
  return [...engines].sort(compare);
}

function makeRow(one) {
  const bar = () => h("span", { class: "bar", "aria-hidden": "true" }, h("i")); // half the cost of a meter
  const spark = svg(
    "svg",
    { class: "spark", viewBox: `0 0 ${SPARK.width} ${SPARK.height}`, "aria-hidden": "true" },
    svg("path"),
  );
  const phase = h(
    "td",
    {},
    h("span", { class: "phase" }),
    h("progress", { max: 1, hidden: true }),
    h("span", { class: "reason" }),
  );
  const figure = (...children) => h("td", { class: "figure" }, ...children, h("span"));
  return h(
    "tr",
    {},
    h("th", { scope: "row" }, one.name),
    phase,
    h("td"),
    h("td", { class: "mono" }),
    figure(bar()),
    figure(),
    figure(spark),
    figure(),
    figure(),
    figure(bar()),
    figure(),
    figure(),
  );
}

function updateRow(row, one, series) {
  const [, phase, role, revision, running, waiting, generated, prompts, ttft, usage, hits, faults] = row.children;
  updatePhase(phase, one);
  setText(role, one.role === "both" ? "whole requests" : one.role);
  setText(revision, one.revision ? one.revision.slice(0, 8) : UNKNOWN);
  setFigure(
    running,
    one.max_running && one.running !== null ? `${count(one.running)} of ${count(one.max_running)}` : count(one.running),
  );
  setBar(running.firstElementChild, one.running === null || !one.max_running ? null : one.running / one.max_running);
  setFigure(waiting, count(one.waiting));
  setFigure(generated, count(one.generated_tokens_s));
  const path = sparkPath(series, SPARK.width, SPARK.height);
  if (generated.dataset.path !== path)
    generated.firstElementChild.firstElementChild.setAttribute("d", (generated.dataset.path = path));
  setFigure(prompts, count(one.prompt_tokens_s));
  setFigure(ttft, one.ttft ? `${seconds(one.ttft.p50)} / ${seconds(one.ttft.p95)}` : UNKNOWN);
  setFigure(usage, percent(one.kv_usage));
  setBar(usage.firstElementChild, one.kv_usage);
  setFigure(hits, percent(one.prefix_hit_ratio));
  setFigure(faults, count(one.faults));
  faults.classList.toggle("bad", one.faults > 0);
}

function updatePhase(cell, one) {
  const [phase, bar, reason] = cell.children;
  const loads = one.phase === "loading" && one.load !== null;
  if (phase.dataset.phase !== one.phase) phase.dataset.phase = one.phase;
  setText(phase, loads ? `loading ${percent(one.load)}` : one.phase);
  if (bar.hidden === loads) bar.hidden = !loads;
  if (loads && bar.value !== one.load) bar.value = one.load;
  bar.setAttribute("aria-label", `${one.name} loads`);
  setText(reason, one.reason ?? "");
}

function setFigure(cell, text) {
  const span = cell.lastElementChild;
  if (span.textContent === text) return;
  span.textContent = text;
  if (text === UNKNOWN) span.title = "not known";
  else span.removeAttribute("title");
}

function setBar(bar, value) {
  if (bar.hidden !== (value === null)) bar.hidden = value === null;
  const share = `scaleX(${Math.min(1, Math.max(0, value ?? 0)).toFixed(3)})`;
  if (bar.dataset.share !== share) bar.firstElementChild.style.transform = bar.dataset.share = share;
}
