// What the tests of modules say of values.

export function equal(found, wanted, where = "") {
  const [a, b] = [JSON.stringify(found), JSON.stringify(wanted)];
  if (a !== b) throw new Error(`${where}\n  found  ${a}\n  wanted ${b}`);
}
