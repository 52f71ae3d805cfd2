"""The process that `pagefleet bench startup` starts: load an engine, ask for one token, say how long it took.

Reads one JSON object `{"model", "options"}` from its input and prints another. Times are of the monotonic clock, which
all processes of a machine share. The engine's log goes to stderr, each line after the milliseconds since the process
began to log.
"""

from __future__ import annotations

import json
import logging
import sys
import time


def main() -> int:
    """Returns the exit status; a mistake in the settings is the last line on stderr."""
    began = time.monotonic()
    logging.basicConfig(level=logging.INFO, format="%(relativeCreated)6d ms %(message)s")
    asked = json.load(sys.stdin)
    from pagefleet_engine import LLM, SamplingParams  # noqa: PLC0415 part of what is measured
    from pagefleet_engine.errors import ConfigError  # noqa: PLC0415

    imported = time.monotonic()
    try:
        llm = LLM(asked["model"], skip_tokenizer_init=True, **asked["options"])
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    before = time.monotonic()
    phases = dict(llm.startup_seconds)
    settings = before - imported - phases.pop("total")
    phases |= {"settings": settings, "imports": phases["imports"] + imported - began}
    llm.generate([{"prompt_token_ids": list(range(16))}], SamplingParams(temperature=0.0, max_tokens=1), use_tqdm=False)
    now = time.monotonic()
    times = {"began_at": began, "first_token_at": now, "first_token_s": now - before}
    print(json.dumps(times | {"phases": phases}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
