// The last minutes of figures, kept in the page: the server tells the present alone. No page here.

export const LENGTH = 90;

/** A figure per poll for each name, the newest last; null where it was not known. */
export class Series {
  /** @type {Map<string, (number | null)[]>} */
  #values = new Map();

  /** Take one poll's figures; names that are not among them are forgotten. @param {Map<string, number | null>} figures */
  push(figures) {
    for (const name of this.#values.keys()) if (!figures.has(name)) this.#values.delete(name);
    for (const [name, value] of figures) {
      const values = this.#values.get(name) ?? [];
      values.push(value ?? null);
      if (values.length > LENGTH) values.shift();
      this.#values.set(name, values);
    }
  }

  of(name) {
    return this.#values.get(name) ?? [];
  }
}

/**
 * Return an SVG path for values, `width` by `height`, the newest at the right; gaps where nothing was known.
 * @param {(number | null)[]} values
 * @param {number} most  what reaches the top; never less than the largest value
 */
export function sparkPath(values, width, height, most = 0) {
  const top = Math.max(most, 1e-9, ...values.filter((value) => value !== null));
  const step = width / (LENGTH - 1);
  const from = LENGTH - values.length;
  let path = "";
  let pen = "M";
  for (const [index, value] of values.entries()) {
    if (value === null) {
      pen = "M";
      continue;
    }
    const [x, y] = [(from + index) * step, height - 1 - (value / top) * (height - 2)];
    path += `${pen}${x.toFixed(1)} ${y.toFixed(1)}`;
    pen = "L";
  }
  return path;
}
