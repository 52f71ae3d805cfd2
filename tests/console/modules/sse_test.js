import { EventReader } from "/console/sse.js";
import { equal } from "./check.js";

const STREAM =
  ': comment\r\n\r\ndata: {"a": "ä€😀"}\n\ndata: one\r\ndata: two\r\rid: 7\nevent: x\ndata:three\n\n\n\ndata\n\ndata: [DONE]\n\ndata: cut';
const EVENTS = ['{"a": "ä€😀"}', "one\ntwo", "three", "", "[DONE]"];
const BYTES = new TextEncoder().encode(STREAM);

function read(pieces) {
  const reader = new EventReader();
  return [...pieces.flatMap((piece) => reader.push(piece)), ...reader.end()];
}

export function every_cut_in_two_gives_the_same_events() {
  for (let at = 0; at <= BYTES.length; at += 1)
    equal(read([BYTES.slice(0, at), BYTES.slice(at)]), EVENTS, `cut at ${at}`);
}

export function every_cut_in_three_gives_the_same_events() {
  for (let a = 0; a <= BYTES.length; a += 1) {
    for (let b = a; b <= BYTES.length; b += 3) {
      equal(read([BYTES.slice(0, a), BYTES.slice(a, b), BYTES.slice(b)]), EVENTS, `cuts at ${a} and ${b}`);
    }
  }
}

export function byte_by_byte_gives_the_same_events() {
  equal(read([...BYTES].map((byte) => new Uint8Array([byte]))), EVENTS);
}

export function an_event_without_end_is_refused() {
  const reader = new EventReader();
  const piece = new TextEncoder().encode("x".repeat(1 << 20));
  let refused = null;
  try {
    for (let count = 0; count < 40; count += 1) reader.push(piece);
  } catch (error) {
    refused = error.name;
  }
  equal(refused, "RangeError");
}
