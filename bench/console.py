"""What the page in the browser costs: `python bench/console.py` (it needs Chromium: `apt-get install chromium`).

Told: the size of all files gzipped; the first paint on loopback, by Chromium's own entries, each time with an empty
profile; and the processor's time that the page takes per update of a hundred engines in which every figure changes,
with the longest piece in which it answered nobody.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from pagefleet_console.pages import read_pages
from pagefleet_protocol.console_state import ConsoleState

from bench.report import write_report
from tests.fakes.chromium import Chromium, find_chromium
from tests.fakes.console_server import ConsoleServer, engine, state

ENGINES = 100
_PAINT = "performance.getEntriesByName('first-contentful-paint')[0]?.startTime"
_WATCH = """(() => { window.longest = 0; window.last = performance.now(); setInterval(() => {
    const now = performance.now(); longest = Math.max(longest, now - last); last = now; }, 5); })()"""


def fleet(random_: random.Random) -> ConsoleState:
    """Return a hundred engines, each with figures of its own."""
    return state(
        [
            engine(
                f"tiny-{number}",
                running=random_.randrange(64),
                waiting=random_.randrange(9),
                kv_usage=random_.random(),
                prefix_hit_ratio=random_.random(),
                generated_tokens_s=random_.uniform(1, 2000),
                prompt_tokens_s=random_.uniform(1, 20000),
            )
            for number in range(ENGINES)
        ]
    )


def first_paints(browser: Chromium, address: str, rounds: int) -> list[float]:
    """Return milliseconds until something was painted, of each round."""
    paints = []
    for _ in range(rounds):
        with browser.page(address) as page:
            paints.append(float(page.wait(_PAINT)))
    return paints


def updates(browser: Chromium, server: ConsoleServer, rounds: int) -> tuple[float, float]:
    """Return milliseconds of processor time per update, and the longest silence of the page in milliseconds."""
    random_ = random.Random(7)
    server.state = fleet(random_)
    with browser.page(f"{server.address}/#fleet") as page:
        page.wait(f"document.querySelectorAll('.engines tbody tr').length === {ENGINES}")
        page.run(_WATCH)
        before = page.seconds_of_work()
        for _ in range(rounds):
            server.state = fleet(random_)
            text = f"{server.state.engines[0].running} of 64"
            page.wait(f"document.querySelector('.engines tbody tr').textContent.includes('{text}')")
        spent = page.seconds_of_work() - before
        return spent * 1000 / rounds, float(page.run("longest"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    program = find_chromium()
    if program is None:
        sys.exit("there is no Chromium here: apt-get install chromium")
    size = sum(len(page.gzipped) for page in read_pages().values())
    server = ConsoleServer()
    server.start()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        browser = Chromium(program, Path(folder))
        try:
            paints = first_paints(browser, server.address, arguments.rounds)
            per_update, longest = updates(browser, server, arguments.rounds)
        finally:
            browser.close()
            server.stop()
    figures = {
        "gzipped_bytes": size,
        "files": len(read_pages()),
        "first_paint_ms": [round(one, 1) for one in paints],
        "first_paint_median_ms": round(statistics.median(paints), 1),
        "update_of_100_engines_cpu_ms": round(per_update, 1),
        "longest_silence_ms": round(longest, 1),
    }
    for name, value in figures.items():
        print(f"{name:32} {value}")
    if arguments.json:
        write_report(arguments.json, "console", figures)


if __name__ == "__main__":
    main()
