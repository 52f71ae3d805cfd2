"""Do answers that were asked for a form hold it? Schemas, expressions, choices and grammars, at temperature 1.

    python bench/forms.py --model NAME --server pagefleet=http://127.0.0.1:8000 --server vllm=http://127.0.0.1:8001 \
        --json bench/results/forms.json

A model with random weights says anything that it may, so what holds is held by the server alone: `--write-model FOLDER`
makes one for both. An answer counts as held if it ended by itself and is of the form that was asked for; one that ran
into whitespace until it was cut is told apart. All servers get the same forms, seeds and token limits, a slow one the
first `--forms` of them. Where the machine has room for one server at a time, another run adds to the file.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import json
import random
import re
import shutil
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import httpx
import jsonschema
from pagefleet_engine.builtin import builtin_model_path

from bench.models import llama_checkpoint
from bench.report import write_report

MAX_TOKENS = 600
SHOWN = 5
"""Broken answers of each server that the report shows."""
WHITESPACE = re.compile(r"\s{40}")

Schema = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Form:
    """What a body asks for, and whether a text is it."""

    kind: str
    body: Mapping[str, Any]
    holds: Callable[[str], bool]


class Forms:
    """Draws forms; the same seed draws the same ones. Everything in them is bounded, so that an answer can end."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)

    def draw(self) -> Form:
        """One form of any kind."""
        kinds = {"schema": 12, "choice": 2, "regex": 4, "grammar": 2}
        kind = self._rng.choices(list(kinds), list(kinds.values()))[0]
        return {"schema": self._json, "choice": self._choice, "regex": self._regex, "grammar": self._grammar}[kind]()

    def _json(self) -> Form:
        kind = self._rng.choice(("object", "nested", "array", "recursive", "union"))
        schema = {"object": self._object, "nested": lambda: self._object(2), "array": self._array,
                  "recursive": self._tree, "union": self._union}[kind]()  # fmt: skip
        asked = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}
        check = jsonschema.Draft202012Validator(schema)

        def holds(text: str) -> bool:
            try:
                return bool(check.is_valid(json.loads(text)))
            except ValueError:
                return False

        return Form(f"json_schema: {kind}", {"response_format": asked}, holds)

    def _choice(self) -> Form:
        choices = sorted(
            {self._word() + self._rng.choice(("", " light", ", dark")) for _ in range(self._rng.randint(2, 9))}
        )
        return Form("choice", {"structured_outputs": {"choice": choices}}, set(choices).__contains__)

    def _regex(self) -> Form:
        pattern = "-".join(self._piece() for _ in range(self._rng.randint(1, 4)))
        return Form("regex", {"structured_outputs": {"regex": pattern}}, lambda text: bool(re.fullmatch(pattern, text)))

    def _grammar(self) -> Form:
        words = [self._word() for _ in range(3)]
        names = " | ".join(f'"{word}"' for word in words)
        grammar = (
            f'root ::= term ((" + " | " - ") term)? \nterm ::= digits | name\ndigits ::= [0-9] [0-9]?\nname ::= {names}'
        )
        term = f"([0-9]{{1,2}}|{'|'.join(words)})"
        return Form(
            "grammar", {"structured_outputs": {"grammar": grammar}},
            lambda text: bool(re.fullmatch(rf"{term}( [+-] {term})?", text)),
        )  # fmt: skip

    def _piece(self) -> str:
        rng = self._rng
        low = rng.randint(1, 3)
        pieces = (
            f"[A-Z]{{{low}}}",
            f"[0-9]{{{low},{low + 2}}}",
            f"({self._word()}|{self._word()})",
            r"\d\d?",
            "[a-f0-9]{4}",
            r"(x|yz){2}",
        )
        return rng.choice(pieces)

    def _word(self) -> str:
        return "".join(self._rng.choices("abcdefghilmnoprstu", k=self._rng.randint(3, 7)))

    def _value(self, depth: int) -> Schema:
        rng = self._rng
        leaves: list[Callable[[], Schema]] = [
            lambda: {"type": "boolean"},
            lambda: {"type": "integer", "minimum": rng.randint(-5, 5), "maximum": rng.randint(6, 900)},
            lambda: {"enum": [self._word(), rng.randint(0, 99), None, True][: rng.randint(1, 4)]},
            lambda: {"const": self._word()},
            lambda: {"type": "string", "maxLength": rng.randint(1, 16)},
            lambda: {"type": "string", "minLength": 2, "maxLength": 9},
            lambda: {"type": "string", "pattern": f"^{self._piece()}$"},
            lambda: {"type": "string", "format": rng.choice(("date", "time", "uuid"))},
            lambda: {"type": ["integer", "null"], "minimum": 0, "maximum": 99},
            lambda: {"anyOf": [{"type": "null"}, {"type": "string", "maxLength": 5}]},
        ]  # fmt: skip
        if depth:
            leaves += [lambda: self._object(depth - 1), lambda: self._array(depth - 1)] * 3
        return rng.choice(leaves)()

    def _object(self, depth: int = 0) -> Schema:
        names = [f"{self._word()}{i}" for i in range(self._rng.randint(1, 5))]
        return {
            "type": "object",
            "properties": {name: self._value(depth) for name in names},
            "required": names if self._rng.random() < 0.6 else names[:1],
            "additionalProperties": False,
        }

    def _array(self, depth: int = 1) -> Schema:
        least = self._rng.randint(0, 2)
        return {
            "type": "array",
            "items": self._value(depth),
            "minItems": least,
            "maxItems": least + self._rng.randint(1, 3),
        }

    def _tree(self) -> Schema:
        node = {
            "type": "object",
            "properties": {
                "value": {"enum": [1, 2, 3]},
                "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]},
            },
            "required": ["value", "next"],
            "additionalProperties": False,
        }
        return {"type": "object", "properties": {"root": {"$ref": "#/$defs/node"}}, "required": ["root"],
                "additionalProperties": False, "$defs": {"node": node}}  # fmt: skip

    def _union(self) -> Schema:
        kinds = [
            {
                "type": "object",
                "properties": {"kind": {"const": name}, "value": self._value(0)},
                "required": ["kind", "value"],
                "additionalProperties": False,
            }
            for name in ("one", "two", "three")
        ]
        return {
            "type": "object",
            "properties": {"item": {"anyOf": kinds}},
            "required": ["item"],
            "additionalProperties": False,
        }


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one form: `held`, `broken`, `cut`, `whitespace`, or `refused`."""

    kind: str
    name: str
    text: str


class Server:
    """One server that is asked."""

    def __init__(self, url: str, model: str, limit: asyncio.Semaphore) -> None:
        self._http = httpx.AsyncClient(base_url=url, timeout=600)
        self._model = model
        self._limit = limit

    async def ask(self, form: Form, seed: int) -> Outcome:
        """Send one request."""
        asked = [{"role": "user", "content": "Answer."}]
        body = {"model": self._model, "messages": asked, "max_tokens": MAX_TOKENS, "temperature": 1.0, "seed": seed}
        async with self._limit:
            answer = await self._http.post("/v1/chat/completions", json={**body, **form.body})
        if answer.status_code != httpx.codes.OK:
            return Outcome(form.kind, "refused", answer.text[:300])
        (choice,) = answer.json()["choices"]
        text = choice["message"]["content"] or ""
        if choice["finish_reason"] == "stop":
            return Outcome(form.kind, "held" if form.holds(text) else "broken", text)
        return Outcome(form.kind, "whitespace" if WHITESPACE.search(text) else "cut", text)


async def ask_all(url: str, model: str, forms: list[Form], clients: int) -> dict[str, Any]:
    """Ask one server for every form; return its figures."""
    server = Server(url, model, asyncio.Semaphore(clients))
    started = time.perf_counter()
    outcomes = await asyncio.gather(*(server.ask(form, seed) for seed, form in enumerate(forms)))
    seconds = time.perf_counter() - started
    by_kind: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for outcome in outcomes:
        by_kind[outcome.kind][outcome.name] += 1
    total = collections.Counter(outcome.name for outcome in outcomes)
    lost = [outcome for outcome in outcomes if outcome.name != "held"]
    return {
        "forms": len(outcomes),
        "held, share": total["held"] / len(outcomes),
        "outcomes": dict(total),
        "by kind": {kind: dict(counts) for kind, counts in sorted(by_kind.items())},
        "seconds": seconds,
        "not held": [f"{outcome.kind}: {outcome.name}: {outcome.text[:160]}" for outcome in lost[:SHOWN]],
    }


def write_model(folder: Path) -> None:
    """Write a model with the embedded one's shape and tokenizer and random weights."""
    source = builtin_model_path("tiny")
    config = json.loads((source / "config.json").read_text())
    llama_checkpoint(folder, {**config, "tie_word_embeddings": False})
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        shutil.copy(source / name, folder / name)


def main() -> None:
    """Ask every server, or write the model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--server", action="append", default=[], metavar="NAME=URL")
    parser.add_argument("--model", default="random")
    parser.add_argument("--forms", type=int, default=1000)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--write-model", type=Path, metavar="FOLDER")
    parser.add_argument("--json", metavar="PATH")
    arguments = parser.parse_args()
    if arguments.write_model:
        write_model(arguments.write_model)
    source = Forms(arguments.seed)
    forms = [source.draw() for _ in range(arguments.forms)]
    figures: dict[str, Any] = {}
    if arguments.json and Path(arguments.json).exists():
        figures = json.loads(Path(arguments.json).read_text(encoding="utf-8"))["figures"]
    for name, url in (server.split("=", 1) for server in arguments.server):
        figures[name] = asyncio.run(ask_all(url, arguments.model, forms, arguments.clients))
        print(name, json.dumps(figures[name], indent=2))
    if arguments.json:
        write_report(arguments.json, "forms", figures)


if __name__ == "__main__":
    main()
