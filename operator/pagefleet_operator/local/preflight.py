"""Whether engines would take their arguments and find their folders, asked of `pagefleet serve --check`.

The engine's own code decides, so what is refused here is refused there, in the same words. It takes a fraction of a
second, and all services are asked at once.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable, Sequence

from pagefleet_protocol.exit_status import MISTAKE, MODEL_NOT_LOADED
from pagefleet_protocol.kube_names import RANKS_PORT

from pagefleet_operator.local.log_files import printable
from pagefleet_operator.local.wanted import Wanted
from pagefleet_operator.plan.command_lines import node_args
from pagefleet_operator.plan.workloads import PartSettings, Workload, plan_workloads

_PATIENCE_S = 20.0
"""A machine that is too busy to answer is no reason to refuse."""
_PREFIX = "pagefleet serve: error: "


async def find_mistakes(services: Iterable[Wanted], serve: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Return what engines would refuse, by service; nothing for those that are right.

    Args:
        services: with their settings in force.
        serve: the beginning of the command line of `pagefleet serve`.
    """
    checked = [(one.name, workload) for one in services for workload in _engines(one)]
    found = await asyncio.gather(*(_mistake(workload, serve) for _, workload in checked))
    mistakes: dict[str, tuple[str, ...]] = {}
    for (name, _), mistake in zip(checked, found, strict=True):
        if mistake and mistake not in mistakes.get(name, ()):
            mistakes[name] = (*mistakes.get(name, ()), mistake)
    return mistakes


def _engines(wanted: Wanted) -> tuple[Workload, ...]:
    """Return the workloads of a service's engines, as they are when all is downloaded."""
    uri = wanted.resolved.uri
    location = uri.local_path if uri.scheme == "file" else uri.text
    parts = {role: PartSettings(resolved, None) for role, resolved in wanted.parts.items()}
    plan = plan_workloads(wanted.service, wanted.resolved, location, spare_gpu=False, scaling=None, parts=parts)
    return plan.parts or (plan.engine,)


def _together(workload: Workload) -> tuple[str, ...]:
    """Return the flags without which several nodes are refused; the file is looked at when an engine starts."""
    if workload.nodes == 1:
        return ()
    return (*node_args("0", "127.0.0.1", RANKS_PORT), "--fleet-key-file", os.devnull)


async def _mistake(workload: Workload, serve: Sequence[str]) -> str | None:
    written = {variable.name: variable.value for variable in workload.env if variable.value is not None}
    try:
        process = await asyncio.create_subprocess_exec(
            *serve,
            *workload.args,
            *_together(workload),
            "--check",
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            env={**os.environ, **written},
        )
    except OSError:
        return None  # told when it is started
    try:
        async with asyncio.timeout(_PATIENCE_S):
            _, said = await process.communicate()
    except TimeoutError:
        return None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode not in (MISTAKE, MODEL_NOT_LOADED):
        return None
    lines = [printable(line) for line in said.decode("utf-8", "replace").splitlines() if line.strip()]
    return lines[-1].removeprefix(_PREFIX)[:500] if lines else f"pagefleet serve refuses {' '.join(workload.args)}"
