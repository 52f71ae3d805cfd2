// Elements from data. Text goes in as text: nothing in this page ever parses HTML.

/**
 * Make an element. Properties: `class`, `on…` (a listener), `true`, `false` and null (there or not), else attributes.
 * @param {string} name
 * @param {Record<string, any>} properties
 * @param {...(Node | string | null | undefined | false)} children
 */
export function h(name, properties = {}, ...children) {
  return filled(document.createElement(name), properties, children);
}

/** As `h`, of SVG. */
export function svg(name, properties = {}, ...children) {
  return filled(document.createElementNS("http://www.w3.org/2000/svg", name), properties, children);
}

function filled(element, properties, children) {
  for (const [name, value] of Object.entries(properties)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "value") element.value = value;
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  element.append(...children.filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

/** A button that says what it does; `more` are further properties. */
export function button(text, act, more = {}) {
  return h("button", { type: "button", onclick: act, ...more }, text);
}

/** Write a text where it is another one: the page is laid out anew only where something changed. */
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** Show or hide. */
export function setShown(element, shown) {
  if (element.hidden === shown) element.hidden = !shown;
}

/**
 * Make the children of an element those of `items`, keeping those that are there: focus and selection stay.
 * @template T
 * @param {Element} parent
 * @param {T[]} items
 * @param {(item: T) => string} keyOf
 * @param {(item: T) => Element} make  called once per key
 * @param {(element: Element, item: T) => void} update
 */
export function keepChildren(parent, items, keyOf, make, update) {
  const known = new Map([...parent.children].map((child) => [child.dataset.key, child]));
  let before = parent.firstElementChild;
  for (const item of items) {
    const key = keyOf(item);
    let child = known.get(key);
    if (!child) {
      child = make(item);
      child.dataset.key = key;
    }
    known.delete(key);
    if (child === before) before = before.nextElementSibling;
    else parent.insertBefore(child, before);
    update(child, item);
  }
  for (const child of known.values()) child.remove();
}

/** Show a text of any length: the first part at once, the rest when it is asked for. */
export function longText(text, limit = 20_000) {
  if (text.length <= limit) return h("pre", { class: "plain" }, text);
  const shown = h("pre", { class: "plain" }, text.slice(0, limit));
  const more = button(
    `Show the rest (${Math.ceil((text.length - limit) / 1000)} k characters)`,
    () => {
      shown.textContent = text;
      more.remove();
    },
    { class: "quiet" },
  );
  return h("div", {}, shown, more);
}

/** Copy a text, and say on the button that it was done. */
export async function copyText(text, where) {
  const before = where.textContent;
  try {
    await navigator.clipboard.writeText(text);
    where.textContent = "Copied";
  } catch {
    where.textContent = "The browser refused";
  }
  setTimeout(() => (where.textContent = before), 1500);
}

/** Tell who listens to the page instead of looking at it. */
export function announce(text) {
  document.getElementById("announce").textContent = text;
}
