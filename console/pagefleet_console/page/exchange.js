// One question to the server and the answer to it, written into a turn as it comes.

import { Answer } from "./answer.js";
import { streamBroken, trouble } from "./remedies.js";
import { ServerError } from "./server.js";

/**
 * Ask, and write what comes into `turn`. It always ends; what went wrong is then in `turn.error`.
 * @param {import("./server.js").Server} server
 * @param {object} body  without `stream`
 * @param {import("./tree.js").Turn} turn  what it has already is kept, and added to
 * @param {{signal: AbortSignal, changed: () => void, now: () => number}} options
 * @returns {Promise<boolean>} whether a key is needed
 */
export async function exchange(server, body, turn, { signal, changed, now }) {
  const before = { content: turn.content, reasoning: turn.reasoning ?? "" };
  const answer = new Answer(now());
  turn.error = null;
  turn.finish = null;
  const take = () => {
    turn.content = before.content + answer.content;
    turn.reasoning = before.reasoning + answer.reasoning;
    turn.calls = answer.calls;
    turn.figures = answer.figures();
    changed();
  };
  const onEvent = (data) => {
    answer.take(data, now());
    take();
  };
  const onPath = (path) => {
    turn.path = path;
  };
  let needsKey = false;
  try {
    await server.chat(streamed(body), { signal, onPath, onEvent });
    if (answer.error)
      turn.error = trouble(answer.error.message, { code: answer.error.code, request: turn.path?.request });
    else if (!answer.done) turn.error = streamBroken(turn.path?.request ?? null);
  } catch (error) {
    if (error.name === "AbortError") answer.finish = "stopped";
    else if (error instanceof ServerError) {
      turn.error = error.trouble;
      needsKey = error.needsKey;
    } else if (error instanceof SyntaxError) {
      turn.error = trouble("The stream holds what is no answer of a chat.", { code: "stream_broken" });
    } else turn.error = streamBroken(turn.path?.request ?? null); // fetch's word for a lost connection is a TypeError
  }
  turn.finish = answer.finish;
  take();
  return needsKey;
}

const streamed = (body) => ({
  ...body,
  stream: true,
  // With each event, so that an answer that is stopped or breaks has its figures too.
  stream_options: { include_usage: true, continuous_usage_stats: true },
});
