// How often a growing answer is drawn: each frame while that is cheap, less often where it costs.

const SHARE = 4;

/** Draws at most once a frame, and spends no more than a fifth of the time on it. */
export class Pace {
  #draw;
  #timer = null;
  #frame = null;
  #notBefore = 0;

  /** @param {() => void} draw */
  constructor(draw) {
    this.#draw = draw;
  }

  /** There is something new to draw. */
  ask() {
    if (this.#timer !== null || this.#frame !== null) return;
    const wait = this.#notBefore - performance.now();
    if (wait > 0) this.#timer = setTimeout(() => this.#onTimer(), wait);
    else this.#frame = requestAnimationFrame(() => this.#onFrame());
  }

  /** Draw no more. */
  end() {
    clearTimeout(this.#timer);
    cancelAnimationFrame(this.#frame);
  }

  #onTimer() {
    this.#timer = null;
    this.#frame = requestAnimationFrame(() => this.#onFrame());
  }

  #onFrame() {
    this.#frame = null;
    const begun = performance.now();
    this.#draw();
    const now = performance.now();
    this.#notBefore = now + SHARE * (now - begun);
  }
}
