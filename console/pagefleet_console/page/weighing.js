// How a router weighed its engines for one request: a table with a bar per engine.

import { h } from "./dom.js";
import { count, seconds } from "./format.js";

const NOT_TOLD =
  "The server did not say how it chose. Routers do where they are started with --explain (spec.router.explain: true), " +
  "unless no engine was ready yet when the request came; one engine alone has nothing to choose.";

/** @param {import("./server.js").Path} path */
export function weighingTable({ weighed, engine }) {
  if (!weighed) return h("p", { class: "note" }, NOT_TOLD);
  if (!weighed.length) return h("p", { class: "note" }, "No engine could be weighed: none was ready.");
  const most = Math.max(...weighed.map((one) => Number(one.seconds) || 0), 1e-9);
  const rows = weighed.map((one) => row(one, one.engine === engine, most));
  const head = ["Engine", "Expected cost", "Cached", "Queued", "Remark"];
  const heads = head.map((text, index) =>
    h("th", { scope: "col", class: index === 2 || index === 3 ? "figure" : null }, text),
  );
  return h(
    "div",
    { class: "wide", tabindex: 0, role: "region", "aria-label": "How the engines were weighed" },
    h("table", { class: "figures" }, h("thead", {}, h("tr", {}, ...heads)), h("tbody", {}, ...rows)),
  );
}

function row(one, chosen, most) {
  const cost = Number(one.seconds) || 0;
  const name = one.prefill ? `${one.engine}, prompt at ${one.prefill}` : one.engine;
  const bar = h("meter", { min: 0, max: most, value: cost, "aria-hidden": "true" });
  const remark = [chosen ? "chosen" : "", String(one.reason ?? "")].filter(Boolean).join(", ");
  return h(
    "tr",
    { class: chosen ? "chosen" : null },
    h("th", { scope: "row" }, name),
    h("td", { class: "cost" }, bar, seconds(cost)),
    h("td", { class: "figure" }, count(one.cached_tokens)),
    h("td", { class: "figure" }, count(one.queued_tokens)),
    h("td", {}, remark),
  );
}
