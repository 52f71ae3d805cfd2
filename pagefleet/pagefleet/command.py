"""`pagefleet VERB ...` runs the program `pagefleet-VERB`, as git does: found beside this one, else on PATH.

So each component brings its own commands, and this file imports nothing but the standard library: it must be instant.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from pagefleet_protocol.exit_status import MISTAKE
from pagefleet_protocol.spelling import near_words
from pagefleet_protocol.version import VERSION

_PREFIX = "pagefleet-"
_KNOWN = {
    "up": ("serve the InferenceServices of a file on this machine", "pagefleet-operator"),
    "run": ("serve a model and talk to it", "pagefleet-operator"),
    "chat": ("talk to a model from this terminal", "pagefleet-operator"),
    "console": ("open the browser console of a service in a cluster", "pagefleet-operator"),
    "serve": ("run one engine with its OpenAI server", "pagefleet-engine"),
    "bench": ("measure engines, kernels and routers", "pagefleet-engine"),
    "quantize": ("write a model's weights in 4 or 8 bits", "pagefleet-engine"),
    "route": ("run a router in front of engines", "pagefleet-router"),
    "operate": ("run the Kubernetes operator", "pagefleet-operator"),
    "download": ("bring a model into a folder, or tell what it is", "pagefleet-download"),
}
_OWN = {
    "doctor": "say what is wrong here, or in the cluster, and what to do",
    "collect-env": "print what a bug report needs",
}
"""Verbs that are there whatever else is installed."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; replaces this process when a verb is given. Returns the exit status otherwise."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    installed = find_verbs(search_path(Path(sys.argv[0]), os.environ.get("PATH", "")))
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(usage(installed))
        return 0
    if arguments[0] in ("-V", "--version", "version"):
        print(f"pagefleet {VERSION}")
        return 0
    verb, *rest = arguments
    if verb in _OWN:
        from pagefleet_protocol.doctor import cli  # noqa: PLC0415 - the other verbs start without it

        run = cli.doctor if verb == "doctor" else cli.collect_env
        return run(rest, installed, os.environ)
    program = installed.get(verb)
    if program is None:
        print(f"pagefleet: error: {refusal(verb, installed)}", file=sys.stderr)
        return MISTAKE
    sys.stdout.flush()
    try:
        os.execv(program, [str(program), *rest])  # noqa: S606 - running that program is this command's purpose
    except OSError as error:
        print(f"pagefleet: error: cannot run {program}: {error.strerror}", file=sys.stderr)
        return 126


def search_path(invoked_as: Path, path_variable: str) -> Iterator[Path]:
    """Yield the folders that may hold verbs, the best first: beside this command, beside Python, then PATH."""
    if invoked_as.name != str(invoked_as):
        yield invoked_as.absolute().parent
    yield Path(sys.executable).parent
    yield from (Path(entry) for entry in path_variable.split(os.pathsep) if entry)


def find_verbs(folders: Iterator[Path]) -> dict[str, Path]:
    """Return the program of each verb; the first folder that has one wins."""
    found: dict[str, Path] = {}
    for folder in folders:
        try:
            names = [entry.name for entry in os.scandir(folder) if entry.name.startswith(_PREFIX)]
        except OSError:
            continue  # PATH often names folders that do not exist
        for name in names:
            program = folder / name
            if name.removeprefix(_PREFIX) not in found and os.access(program, os.X_OK) and program.is_file():
                found[name.removeprefix(_PREFIX)] = program
    return found


def usage(installed: Mapping[str, Path]) -> str:
    """Return the help text: the known verbs in the order one needs them, then any others."""
    order = [verb for verb in _KNOWN if verb in installed] + sorted(set(installed) - set(_KNOWN))
    words = {verb: _KNOWN[verb][0] if verb in _KNOWN else str(installed[verb]) for verb in order} | _OWN
    lines = [f"  {verb:<11} {text}" for verb, text in words.items()]
    return "\n".join(
        [
            "usage: pagefleet VERB ...      (pagefleet VERB --help tells more; pagefleet --version)",
            "",
            "Serves large language models: engine, router, operator.",
            "",
            *([] if order else ["  No server is installed here: install pagefleet's engine, router and operator."]),
            *lines,
        ]
    )


def refusal(verb: str, installed: Mapping[str, Path]) -> str:
    """Say why a verb cannot be run, and what to do."""
    if verb in _KNOWN:
        return f"'{verb}' belongs to {_KNOWN[verb][1]}, which is not installed in this environment"
    near = near_words(verb, [*installed, *_OWN])
    hint = f"did you mean '{near[0]}'?" if near else "pagefleet --help lists the verbs"
    return f"there is no verb {verb[:40]!a}; {hint}"
