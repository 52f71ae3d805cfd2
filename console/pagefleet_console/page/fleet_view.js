// The fleet as it is now: sums, engines, K/V between them, lines at the door, the autoscaler, what went wrong.

import { h, keepChildren, setShown, setText, svg } from "./dom.js";
import { EngineTable } from "./engine_table.js";
import { Flows } from "./flows.js";
import { fleetSum } from "./fleet_sum.js";
import { count, percent, plural, seconds, timeOfDay } from "./format.js";
import { Series, sparkPath } from "./series.js";

/** Name, title, and how its value is written. */
const SUMS = [
  ["ready", "Engines ready", (sum) => `${sum.ready} of ${sum.engines}`],
  ["running", "Running", (sum) => count(sum.running)],
  ["waiting", "Waiting", (sum) => count(sum.waiting)],
  ["generated", "Tokens/s", (sum) => count(sum.generated)],
  ["prompts", "Prompt tokens/s", (sum) => count(sum.prompts)],
  ["ttft", "First token, p95", (sum) => seconds(sum.ttft)],
  ["usage", "K/V in use", (sum) => percent(sum.usage)],
  ["hits", "Prefix hits", (sum) => percent(sum.hits)],
];
/** Conditions that are true where something is out of order; of all others the truth is good. */
const TELL_TROUBLE = new Set(["Degraded", "Progressing"]);
const SPARK = { width: 120, height: 26 };

/** The view at #fleet. It is drawn while it is shown; its series go on meanwhile. */
export class FleetView {
  element;
  #title = h("h1");
  #about = h("p", { class: "note" });
  #stale = h("p", { class: "stale", role: "status", hidden: true });
  #statements = h("ul", { class: "statements" });
  #sums = h("dl", { class: "sums" });
  #engineSeries = new Series();
  #sumSeries = new Series();
  #engines = new EngineTable(this.#engineSeries);
  #flows = new Flows();
  #admission = listCard("Lines at the door", "admission");
  #scaling = listCard("Autoscaler", "scaling");
  #faults = listCard("What went wrong", "faults");
  #state = null;

  constructor() {
    for (const [, title] of SUMS) {
      const spark = svg(
        "svg",
        { class: "spark", viewBox: `0 0 ${SPARK.width} ${SPARK.height}`, "aria-hidden": "true" },
        svg("path"),
      );
      this.#sums.append(h("div", {}, h("dt", {}, title), h("dd"), spark));
    }
    const cards = h("div", { class: "cards" }, this.#flows.element, this.#admission.element, this.#scaling.element);
    const top = h("div", { class: "title" }, this.#title, this.#about);
    this.element = h(
      "section",
      { class: "page fleet", "aria-label": "Fleet" },
      top,
      this.#stale,
      this.#statements,
      this.#sums,
      this.#engines.element,
      cards,
      this.#faults.element,
    );
  }

  /** @param {import("./poller.js").Seen} seen */
  take({ state, fresh, at, trouble }) {
    setShown(this.#stale, !fresh);
    if (!fresh) {
      const then = state ? `What follows was so at ${timeOfDay(at)}.` : "";
      setText(this.#stale, `${trouble?.what ?? "The state cannot be read."} ${trouble?.remedy ?? ""} ${then}`);
    }
    this.#state = state;
    if (!state) return;
    const sum = fleetSum(state.engines);
    if (fresh) {
      this.#engineSeries.push(new Map(state.engines.map((one) => [one.name, one.generated_tokens_s])));
      this.#sumSeries.push(new Map(SUMS.map(([name]) => [name, sum[name]])));
    }
    if (!this.element.hidden) this.draw();
  }

  draw() {
    if (!this.#state) {
      setText(this.#title, "Fleet");
      return;
    }
    const { service, engines, pairs, admission, scaling, faults } = this.#state;
    setText(this.#title, service.name ?? (this.#state.source === "engine" ? "One engine" : "Fleet"));
    setText(this.#about, about(this.#state));
    this.#drawStatements(service.statements);
    this.#drawSums(fleetSum(engines));
    this.#engines.update(engines);
    this.#flows.update(pairs);
    this.#admission.update(admission, (one) => one.tenant, admissionTexts);
    this.#scaling.update(scaling.flatMap(decisionsOf), (one) => `${one.role} ${one.at}`, decisionTexts);
    this.#faults.update(faults, (one) => `${one.what} ${one.engine}`, faultTexts);
  }

  #drawSums(sum) {
    for (const [index, [name, , text]] of SUMS.entries()) {
      const [, value, spark] = this.#sums.children[index].children;
      setText(value, text(sum));
      const most = name === "usage" || name === "hits" ? 1 : name === "ready" ? sum.engines : 0;
      spark.firstElementChild.setAttribute("d", sparkPath(this.#sumSeries.of(name), SPARK.width, SPARK.height, most));
    }
  }

  #drawStatements(statements) {
    const wrong = statements.filter((one) => (one.status === "True") === TELL_TROUBLE.has(one.type));
    const make = () => h("li", {}, h("strong"), " ", h("span"));
    keepChildren(
      this.#statements,
      wrong,
      (one) => one.type,
      make,
      (item, one) => {
        setText(item.firstElementChild, `${one.type}: ${one.reason}`);
        setText(item.lastElementChild, one.message);
      },
    );
  }
}

function about({ service, workers, source, tenant }) {
  const parts = [
    service.namespace ? `namespace ${service.namespace}` : null,
    service.models.length ? service.models.join(", ") : "no model yet",
    `pagefleet ${service.version}`,
    source === "router" ? plural(workers, "router process").replace("processs", "processes") : null,
    tenant ? `seen as ${tenant}` : null,
  ];
  return parts.filter(Boolean).join(" · ");
}

/** A card that lists things of three texts each: what, the figures at its right, and what there is to say below. */
function listCard(title, id) {
  const list = h("ul", { class: "things" });
  const element = h(
    "section",
    { class: "card", hidden: true, "aria-labelledby": `${id}-title` },
    h("h2", { id: `${id}-title` }, title),
    list,
  );
  const make = () => h("li", {}, h("strong"), h("span", { class: "at" }), h("p"), h("p", { class: "note" }));
  const update = (items, keyOf, textsOf) => {
    setShown(element, items.length > 0);
    keepChildren(list, items, keyOf, make, (item, one) => {
      for (const [index, text] of textsOf(one).entries()) {
        setText(item.children[index], text);
        setShown(item.children[index], text !== "");
      }
    });
  };
  return { element, update };
}

const admissionTexts = (one) => [
  one.tenant || "Everybody",
  `${count(one.running)} running, ${count(one.waiting)} waiting`,
  one.refused ? `${count(one.refused)} turned away since the router started` : "",
  "",
];

const decisionsOf = ({ role, mode, current, decisions }) =>
  decisions.map((one, index) => ({ ...one, role, mode, current, newest: index === 0 }));

function decisionTexts({ role, mode, current, wanted, reason, signal, at, newest }) {
  const now = newest ? `, ${plural(current, "engine")} now` : "";
  const how = { Internal: "", External: " (somebody else scales)", Advisory: " (advice only)" }[mode] ?? "";
  return [
    `${role === "engine" ? "" : `${role}: `}${plural(wanted, "engine")} wanted${now}`,
    timeOfDay(at),
    `${reason}${how}`,
    signal,
  ];
}

const faultTexts = ({ what, remedy, at, engine, count: times }) => [
  what,
  `${timeOfDay(at)}${times > 1 ? `, ${count(times)} times` : ""}`,
  remedy,
  engine ?? "",
];
