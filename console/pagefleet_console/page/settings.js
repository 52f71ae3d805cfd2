// The parameters of a chat: what a form holds, as text, and what of it goes into a request. No page here.

/** @typedef {{model: string, system: string, temperature: string, top_p: string, max_tokens: string, seed: string, tools: string}} Settings */

/** @type {Settings} */
export const DEFAULTS = { model: "", system: "", temperature: "", top_p: "", max_tokens: "", seed: "", tools: "" };

/** Name, label, least, most, whether whole; empty is what the server takes by itself. */
export const NUMBERS = [
  { name: "temperature", label: "Temperature", min: 0, max: 2, whole: false },
  { name: "top_p", label: "Top p", min: 0.000001, max: 1, whole: false },
  { name: "max_tokens", label: "Max tokens", min: 1, max: 10_000_000, whole: true },
  { name: "seed", label: "Seed", min: -(2 ** 53), max: 2 ** 53, whole: true },
];

/**
 * Read a form.
 * @param {Settings} settings
 * @returns {{fields: object, faults: Record<string, string>}} fields of a request; for each wrong entry what is wrong
 */
export function requestFields(settings) {
  const fields = {};
  const faults = {};
  for (const { name, label, min, max, whole } of NUMBERS) {
    const text = (settings[name] ?? "").trim();
    if (!text) continue;
    const value = Number(text);
    if (!Number.isFinite(value) || value < min || value > max || (whole && !Number.isInteger(value))) {
      faults[name] = `${label} is ${whole ? "a whole number" : "a number"} from ${min} to ${max}.`;
    } else fields[name] = value;
  }
  try {
    const tools = readTools(settings.tools ?? "");
    if (tools.length) fields.tools = tools;
  } catch (error) {
    faults.tools = error.message;
  }
  return { fields, faults };
}

/** Read tools: an array of functions, or one, as OpenAI writes them or the functions alone. */
function readTools(text) {
  if (!text.trim()) return [];
  let value;
  try {
    value = JSON.parse(text);
  } catch (error) {
    throw new Error(`Tools are JSON: ${error.message}`);
  }
  const tools = (Array.isArray(value) ? value : [value]).map((one) =>
    one?.type === "function" ? one : { type: "function", function: one },
  );
  for (const [index, tool] of tools.entries()) {
    if (typeof tool.function?.name !== "string" || !/^[\w-]{1,64}$/.test(tool.function.name)) {
      throw new Error(`Tool ${index + 1} needs a "name" of letters, digits, _ and -.`);
    }
  }
  return tools;
}

export const TOOLS_EXAMPLE = JSON.stringify(
  [
    {
      name: "get_weather",
      description: "The weather of a city now",
      parameters: { type: "object", properties: { city: { type: "string" } }, required: ["city"] },
    },
  ],
  null,
  2,
);
