"""The process that `pagefleet bench startup` starts: load an engine, ask for one token, say how long it took.

Reads one JSON object `{"model", "options"}` from its input and prints another. Times are of the monotonic clock, which
all processes of a machine share.
"""

from __future__ import annotations

import json
import sys
import time


def main() -> int:
    """Returns the exit status; a mistake in the settings is one line on stderr."""
    asked = json.load(sys.stdin)
    from pagefleet_engine import LLM, SamplingParams  # noqa: PLC0415 part of what is measured
    from pagefleet_engine.errors import ConfigError  # noqa: PLC0415

    try:
        llm = LLM(asked["model"], skip_tokenizer_init=True, **asked["options"])
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    before = time.monotonic()
    llm.generate([{"prompt_token_ids": list(range(16))}], SamplingParams(temperature=0.0, max_tokens=1), use_tqdm=False)
    now = time.monotonic()
    print(json.dumps({"first_token_at": now, "first_token_s": now - before, "phases": dict(llm.startup_seconds)}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
