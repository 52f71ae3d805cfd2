// Figures in words. What is not known is a dash, never a zero.

export const UNKNOWN = "–";

/** 1234567 as `1.23 M`; three digits that count. */
export function count(value) {
  if (value === null || value === undefined) return UNKNOWN;
  const size = Math.abs(value);
  if (size < 1000) return Number.isInteger(value) ? String(value) : digits(value);
  for (const [unit, name] of [
    [1e12, "T"],
    [1e9, "G"],
    [1e6, "M"],
    [1e3, "k"],
  ]) {
    if (size >= unit * 0.9995) return `${digits(value / unit)} ${name}`;
  }
  return `${digits(value / 1000)} k`;
}

/** Bytes a second, or bytes, by powers of 1024. */
export function bytes(value) {
  if (value === null || value === undefined) return UNKNOWN;
  const names = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (value >= 1023.5 && unit < names.length - 1) {
    value /= 1024;
    unit += 1;
  }
  return `${unit ? digits(value) : Math.round(value)} ${names[unit]}`;
}

/** A duration of so many seconds: `3.2 ms`, `0.18 s`, `4 min 10 s`. */
export function seconds(value) {
  if (value === null || value === undefined) return UNKNOWN;
  if (value > 0 && value < 0.0995) return `${digits(value * 1000)} ms`;
  if (value < 99.5) return `${digits(value)} s`;
  const whole = Math.round(value);
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${whole % 60} s`;
  return `${Math.floor(whole / 3600)} h ${Math.floor((whole % 3600) / 60)} min`;
}

/** A ratio as whole percents. */
export function percent(value) {
  return value === null || value === undefined ? UNKNOWN : `${Math.round(value * 100)} %`;
}

/** The time of day of an RFC 3339 time, here. */
export function timeOfDay(text) {
  const at = new Date(text);
  return Number.isNaN(at.getTime()) ? UNKNOWN : at.toLocaleTimeString(undefined, { hour12: false });
}

/** `1 engine`, `3 engines`. */
export const plural = (value, noun) => `${count(value)} ${noun}${value === 1 ? "" : "s"}`;

function digits(value) {
  const size = Math.abs(value);
  if (size === 0) return "0";
  return size >= 99.95 ? value.toFixed(0) : size >= 9.995 ? value.toFixed(1) : value.toFixed(2);
}
