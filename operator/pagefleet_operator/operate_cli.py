"""`pagefleet operate`: runs InferenceServices on Kubernetes."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

_DESCRIPTION = """\
Makes Kubernetes run the InferenceServices of one or more namespaces, or of the whole cluster: engines, routers, model
downloads, and all that they need. Runs in a pod with the rights that the chart gives it, or outside with --kubeconfig.
Every flag can also be given as a variable: PAGEFLEET_OPERATOR_ENGINE_IMAGE is --engine-image; lists are separated by
commas."""
_ENVIRONMENT = "PAGEFLEET_OPERATOR_"
_TRUE = frozenset({"1", "true", "yes"})


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Returns 0 after a clean stop, 1 after a failure, 2 when the settings cannot work."""
    arguments = _parse(sys.argv[1:] if argv is None else argv, os.environ)
    # After parsing: --help is instant, and a mistake on the command line costs nothing.
    from pagefleet_operator.errors import OperatorError, SettingsError  # noqa: PLC0415
    from pagefleet_operator.handlers.operate import operate, settings_from  # noqa: PLC0415

    try:
        return operate(settings_from(arguments, os.environ))
    except OperatorError as error:
        for line in str(error).splitlines():
            print(f"error: {line}", file=sys.stderr)
        return 2 if isinstance(error, SettingsError) else 1
    except KeyboardInterrupt:
        return 130  # before there was anything to stop


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="pagefleet operate", description=_DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    where = parser.add_argument_group("where")
    where.add_argument("--namespace", action="append", metavar="NS", help="serve this namespace; repeatable")
    where.add_argument("--kubeconfig", type=Path, metavar="FILE", help="how to reach the cluster from outside")
    images = parser.add_argument_group("what pods run")
    images.add_argument("--engine-image", metavar="IMAGE", help="image of engines")
    images.add_argument("--router-image", metavar="IMAGE", help="image of routers")
    images.add_argument("--operator-image", metavar="IMAGE", help="image of model downloads: the operator's own")
    images.add_argument("--image-pull-secret", action="append", metavar="NAME", help="for these images; repeatable")
    images.add_argument("--cluster-domain", default="cluster.local", metavar="DOMAIN", help="of Services' names")
    images.add_argument("--hf-endpoint", default="", metavar="URL", help="mirror of Hugging Face")
    policy = parser.add_argument_group("what InferenceServices may ask for")
    policy.add_argument("--allowed-image", action="append", metavar="PREFIX", help="images of engines; repeatable")
    policy.add_argument("--allowed-host-path", action="append", metavar="DIR", help="folders of nodes; repeatable")
    policy.add_argument("--allow-any-pod-template", action="store_true", help="also privileges and host namespaces")
    policy.add_argument("--no-network-policies", action="store_true", help="make no NetworkPolicies")
    policy.add_argument(
        "--api-server-port",
        action="append",
        type=_port,
        metavar="PORT",
        help="of the API server, where NetworkPolicies let routers out; repeatable; default: 443, 6443",
    )
    process = parser.add_argument_group("this process")
    process.add_argument("--operator-namespace", metavar="NS", help="where it runs; default: from its pod")
    process.add_argument(
        "--lease-name", default="pagefleet-operator", metavar="NAME", help="of the Lease of the leader"
    )
    process.add_argument("--no-leader-election", action="store_true", help="lead without asking: it is the only one")
    process.add_argument("--host", default="0.0.0.0", help="address of probes and metrics")  # noqa: S104 - see settings
    process.add_argument("--port", type=_port, default=8080, help="of /livez, /readyz and /metrics; 0 takes any")
    process.add_argument(
        "--resync-seconds", type=_seconds, default=300.0, metavar="S", help="longest time without a look"
    )
    process.add_argument("--workers", type=_count, default=8, metavar="N", help="InferenceServices worked on at a time")
    return parser


def _parse(argv: Sequence[str], environment: Mapping[str, str]) -> argparse.Namespace:
    """Read the command line; what it does not give comes from variables."""
    parser = _parser()
    variables = [flag for action in parser._actions for flag in _as_flags(action, environment)]
    given = parser.parse_args(argv)
    # Lists of the two would add up otherwise.
    lists = {name: values for name, values in vars(given).items() if isinstance(values, list)}
    arguments = parser.parse_args([*variables, *argv])
    vars(arguments).update(lists)
    return arguments


def _as_flags(action: argparse.Action, environment: Mapping[str, str]) -> list[str]:
    """Return what a variable says as it would be written on the command line."""
    text = environment.get(_ENVIRONMENT + action.dest.upper(), "")
    flag = next(iter(action.option_strings), "")
    if not text or not flag or action.dest == "help":
        return []
    if action.nargs == 0:
        return [flag] if text.lower() in _TRUE else []
    values = text.split(",") if isinstance(action, argparse._AppendAction) else [text]
    return [f"{flag}={value.strip()}" for value in values if value.strip()]


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port: give 0 to 65535")
    return int(text)


def _count(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 256:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of workers: give 1 to 256")
    return int(text)


def _seconds(text: str) -> float:
    if not text.isdecimal() or not 10 <= int(text) <= 86_400:
        raise argparse.ArgumentTypeError(f"{text!r} are no seconds: give 10 to 86400")
    return float(text)


if __name__ == "__main__":
    sys.exit(main())
