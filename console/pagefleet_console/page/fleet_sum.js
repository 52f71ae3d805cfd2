// What the figures of all engines come to. What no engine tells is null, never zero. No page here.

/**
 * @param {object[]} engines  EngineState of the protocol
 */
export function fleetSum(engines) {
  const known = (name) =>
    engines.map((engine) => engine[name]).filter((value) => value !== null && value !== undefined);
  const total = (name) => {
    const values = known(name);
    return values.length ? values.reduce((sum, value) => sum + value, 0) : null;
  };
  const usage = known("kv_usage");
  return {
    ready: engines.filter((engine) => engine.phase === "ready").length,
    engines: engines.length,
    revisions: new Set(known("revision")).size,
    running: total("running"),
    waiting: total("waiting"),
    generated: total("generated_tokens_s"),
    prompts: total("prompt_tokens_s"),
    usage: usage.length ? usage.reduce((sum, value) => sum + value, 0) / usage.length : null,
    hits: weighedHits(engines),
    ttft: slowest(known("ttft").map((one) => one.p95)),
  };
}

/** Weigh each engine's share of hits by the prompt tokens that it gets. */
function weighedHits(engines) {
  const known = engines.filter((one) => typeof one.prefix_hit_ratio === "number");
  if (!known.length) return null;
  const weight = known.reduce((sum, one) => sum + (one.prompt_tokens_s ?? 0), 0);
  if (!weight) return known.reduce((sum, one) => sum + one.prefix_hit_ratio, 0) / known.length;
  return known.reduce((sum, one) => sum + one.prefix_hit_ratio * (one.prompt_tokens_s ?? 0), 0) / weight;
}

const slowest = (values) => (values.length ? Math.max(...values) : null);

/** One word and its tone for the whole: what the page's head shows. */
export function fleetHealth({ ready, engines }) {
  if (!engines) return { tone: "none", text: "no engine" };
  return { tone: ready === engines ? "good" : ready ? "part" : "bad", text: `${ready} of ${engines} ready` };
}
