// The API as /openapi.json describes it: one line for each route, which opens.

import { h } from "./dom.js";

const REF = "#/components/schemas/";

/** Say in words what a schema allows. */
function words(schema) {
  if (schema.$ref) return schema.$ref.slice(REF.length);
  if (schema.enum) return schema.enum.map((one) => JSON.stringify(one)).join(" or ");
  if (schema.const !== undefined) return JSON.stringify(schema.const);
  if (schema.anyOf) return schema.anyOf.map(words).join(" or ");
  if (schema.type === "array")
    return schema.items?.$ref || schema.items?.type ? `array of ${words(schema.items)}` : "array";
  const kind = [schema.type ?? "anything"].flat().join(" or ");
  const low = schema.minimum === undefined ? "" : `, from ${schema.minimum}`;
  return kind + low + (schema.maximum === undefined ? "" : `, to ${schema.maximum}`);
}

/** A table of an object's fields. */
function fields(schema) {
  const required = new Set(schema.required ?? []);
  const rows = Object.entries(schema.properties ?? {}).map(([name, its]) =>
    h(
      "tr",
      {},
      h("th", { scope: "row" }, h("code", {}, name)),
      h("td", {}, words(its)),
      h("td", { class: "note" }, required.has(name) ? "required" : ""),
    ),
  );
  return h("table", {}, h("tbody", {}, ...rows));
}

function route(method, path, operation, schemas) {
  const schemaOf = (content) => content?.["application/json"]?.schema;
  const part = (title, schema) => {
    const named = schema?.$ref ? schemas[schema.$ref.slice(REF.length)] : schema;
    return named?.properties ? [h("h2", {}, title), fields(named)] : [];
  };
  return h(
    "details",
    {},
    h("summary", {}, h("code", {}, `${method.toUpperCase()} ${path}`), h("span", { class: "note" }, operation.summary)),
    ...part("Body", schemaOf(operation.requestBody?.content)),
    ...part("Answer", schemaOf(operation.responses["200"].content)),
  );
}

async function show(main) {
  const answer = await fetch("/openapi.json");
  if (!answer.ok) throw new Error(`the server answers ${answer.status}`);
  const api = await answer.json();
  const schemas = api.components.schemas;
  const routes = Object.entries(api.paths).flatMap(([path, methods]) =>
    Object.entries(methods).map(([method, operation]) => route(method, path, operation, schemas)),
  );
  const types = Object.entries(schemas)
    .filter(([, schema]) => schema.properties)
    .map(([name, schema]) => h("details", {}, h("summary", {}, h("code", {}, name)), fields(schema)));
  main.append(
    h(
      "div",
      { class: "api" },
      h("h1", {}, `API of ${api.info.title} ${api.info.version}`),
      h("p", { class: "note" }, "For programs: ", h("a", { href: "/openapi.json" }, "/openapi.json"), "."),
      ...routes,
      h("h1", {}, "Types"),
      ...types,
    ),
  );
}

const main = document.getElementById("main");
show(main).catch((error) =>
  main.append(h("p", { class: "page fault", role: "alert" }, `The API's description cannot be had: ${error.message}`)),
);
