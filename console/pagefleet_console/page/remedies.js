// What went wrong, in the server's words where it has some, and what to do about it. No page here.

/**
 * @typedef {object} Trouble
 * @property {string} what  one sentence
 * @property {string} remedy  one sentence; may be empty
 * @property {string | null} code
 * @property {number | null} status  of HTTP; null: there was no answer, or it began well
 * @property {number | null} wait  seconds after which another try may help
 * @property {string | null} request  the id that the server's log has
 */

const BY_CODE = {
  context_length_exceeded: "Start a new chat, edit an earlier turn to be shorter, or ask for fewer tokens.",
  engine_dead: "The engine is started anew: try again in a minute. Fleet says how it stands.",
  engine_stalled: "The engine makes no progress: try again in a minute. Fleet says how it stands.",
  engine_loading: "The engine loads its model: Fleet shows how far it is.",
  engine_lost: "Go on: another engine takes over from what came.",
  internal_error: "Try again. The server's log has more under the request's id.",
  invalid_api_key: "Enter a key that the server knows.",
  invalid_value: "Change that parameter and ask again.",
  kv_load_failed: "Try again: the prompt is then computed where it is answered.",
  model_not_found: "Choose another model: what is served has changed since this page was loaded.",
  no_engine_known: "No engine is there yet. Fleet shows them as they come.",
  no_engine_ready: "Engines are starting, or all of them failed. Fleet says which.",
  out_of_memory: "Ask for fewer tokens, or try again when less is running.",
  queue_full: "Too many requests wait: try again in a moment.",
  queue_timeout: "It waited too long for a free engine: try again in a moment.",
  rate_limit_exceeded: "Your key's limit is reached: try again later.",
  request_failed: "Try again. The server's log has more under the request's id.",
  request_too_large: "Send less text or smaller pictures; the server's --max-body-bytes sets the limit.",
  server_is_overloaded: "Too many requests wait: try again in a moment.",
  server_shutting_down: "The server is restarting: try again in a moment.",
  stream_broken: "Go on from here, or try again. If it happens again, Fleet shows which engine failed.",
  timeout: "Try again; if it stays slow, Fleet shows how many requests wait.",
  unreachable: "Check that the server runs and that this machine reaches it, then try again.",
  unsupported_parameter: "Take that parameter out and ask again.",
};

const BY_STATUS = {
  400: "Change the request as the message says.",
  401: BY_CODE.invalid_api_key,
  403: "Ask whoever runs this server for the right to do this.",
  404: "Reload the page: the server may be another one by now.",
  413: BY_CODE.request_too_large,
  429: BY_CODE.queue_full,
  503: "Try again in a moment. Fleet says which engines are ready.",
};

/** @returns {Trouble} */
export function trouble(what, { code = null, status = null, wait = null, request = null } = {}) {
  const remedy = BY_CODE[code] ?? BY_STATUS[status] ?? (status >= 500 ? BY_CODE.internal_error : "");
  return { what, remedy, code, status, wait, request };
}

/** Nothing listens there, the network is gone, or the browser refused to ask. */
export const unreachable = () => trouble("The server did not answer.", { code: "unreachable" });

/** The stream ended without its end. */
export const streamBroken = (request) =>
  trouble("The connection broke before the answer was complete.", { code: "stream_broken", request });

/** Say whether going on from what came is worth offering, rather than the whole again. */
export const canGoOn = (fault) =>
  !["context_length_exceeded", "invalid_api_key", "model_not_found"].includes(fault.code);
