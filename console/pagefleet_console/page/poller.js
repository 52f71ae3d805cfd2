// Asks for the fleet's state every two seconds, seldom while nobody looks, and tells how old the last answer is.

const SHOWN = 2000;
const HIDDEN = 20_000;

/**
 * @typedef {object} Seen
 * @property {object | null} state  the last document of /console/state; null: none yet
 * @property {boolean} fresh  whether the last question was answered
 * @property {Date | null} at  when one last was
 * @property {import("./remedies.js").Trouble | null} trouble
 */

/** Polls until it is stopped. */
export class Poller {
  #ask;
  #told;
  #timer = null;
  #running = false;
  #state = null;
  #at = null;

  /**
   * @param {() => Promise<object>} ask
   * @param {(seen: Seen) => void} told  called after each answer, and each failure
   */
  constructor(ask, told) {
    this.#ask = ask;
    this.#told = told;
    document.addEventListener("visibilitychange", () => {
      if (this.#running && !document.hidden) this.#now();
    });
  }

  start() {
    this.#running = true;
    this.#now();
  }

  stop() {
    this.#running = false;
    this.#state = null;
    clearTimeout(this.#timer);
    this.#timer = null;
  }

  async #now() {
    clearTimeout(this.#timer);
    this.#timer = null;
    let seen;
    try {
      this.#state = await this.#ask();
      this.#at = new Date();
      seen = { state: this.#state, fresh: true, at: this.#at, trouble: null };
    } catch (error) {
      seen = { state: this.#state, fresh: false, at: this.#at, trouble: error.trouble ?? null };
    }
    if (!this.#running) return;
    this.#told(seen);
    clearTimeout(this.#timer);
    if (this.#running) this.#timer = setTimeout(() => this.#now(), document.hidden ? HIDDEN : SHOWN);
  }
}
