"""`pagefleet up` as people start it, with real engines and a real router, and what tests ask of it from outside."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

import httpx
import yaml
from pagefleet_protocol.endpoints import Endpoint, decode_endpoints
from prometheus_client.parser import text_string_to_metric_families

from tests.fakes.fleet_processes import child_pids, recorded_pids

SERVICE = "tiny"
PATIENCE_S = 600.0
"""For whatever a machine that does other things too may take long over."""
LOOK_S = 0.1
"""Between two looks at something: each may fetch the figures of a whole fleet, which starts on the same cores."""
ENGINE_ARGS = ["--num-threads", "1", "--num-kv-blocks", "2048"]


class FleetProcess:
    """One running `pagefleet up` of one InferenceService, of builtin://tiny unless another model is given.

    Args:
        folder: for the manifest, the state and the output.
        program: takes the flags of `pagefleet up`; `python` runs it.
        environment: variables besides our own.
        spec: fields of the InferenceService's spec besides the engine's args.
    """

    def __init__(
        self,
        folder: Path,
        program: Sequence[str] = ("-m", "pagefleet_operator.cli"),
        environment: Mapping[str, str] = MappingProxyType({}),
        python: Path = Path(sys.executable),
        **spec: Any,
    ) -> None:
        self.state_dir = folder / "state"
        self._manifest = folder / "fleet.yaml"
        self._output = folder / "output.txt"
        self.spec: dict[str, Any] = {}
        self.edit(**spec)
        command = [str(python), *program, str(self._manifest), "--port", "0"]
        with self._output.open("w") as output:
            self.process = subprocess.Popen(
                [*command, "--state-dir", str(self.state_dir)],
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, "OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(folder / "cache"), **environment},
                # Of its own group, so that a Ctrl-C can be given to it and to whatever shares its terminal.
                start_new_session=True,
            )
        self._http = httpx.Client(timeout=PATIENCE_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._http.close()
        self.process.terminate()
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.terminate()  # a test failed and left requests open: the second signal ends them
            self.process.wait(PATIENCE_S)

    @property
    def output(self) -> str:
        """All that it has printed."""
        return self._output.read_text()

    @property
    def url(self) -> str:
        """Of the router."""
        (line,) = (line for line in self.output.splitlines() if line.startswith(f"{SERVICE}: serves "))
        return line.rpartition(" ")[2]

    def edit(self, **spec: Any) -> None:
        """Change fields of the spec in the file, as an editor saves it."""
        self.spec |= spec
        engine = {"args": ENGINE_ARGS, **self.spec.get("engine", {})}
        document = {
            "apiVersion": "pagefleet.dev/v1alpha1",
            "kind": "InferenceService",
            "metadata": {"name": SERVICE},
            "spec": {**self.spec, "model": {"uri": "builtin://tiny", **self.spec.get("model", {})}, "engine": engine},
        }
        part = self._manifest.with_suffix(".part")
        part.write_text(yaml.safe_dump(document))
        part.replace(self._manifest)

    def until(self, condition: Callable[[], bool], timeout_s: float = PATIENCE_S) -> float:
        """Wait for something to become true; returns the seconds it took."""
        started = time.monotonic()
        while not condition():
            assert self.process.poll() is None, f"the fleet ended:\n{self.output}"
            assert time.monotonic() - started < timeout_s, f"did not happen:\n{self.output}"
            time.sleep(LOOK_S)
        return time.monotonic() - started

    def serves(self, engines: int) -> bool:
        """Whether so many engines run, none besides, and the router sends to all of them."""
        try:
            listed = [one for one in self.endpoints() if not one.draining]
            instances = [name for name in self.pids() if not name.startswith(f"{SERVICE}-router")]
            if not len(listed) == len(instances) == engines:
                return False
            return self.metrics(self.url).get('pagefleet_router_endpoints{state="ready"}') == engines
        except (OSError, ValueError, httpx.TransportError):
            return False  # still starting

    def endpoints(self) -> tuple[Endpoint, ...]:
        """Return what the router may send to."""
        return decode_endpoints((self.state_dir / f"{SERVICE}.endpoints.json").read_bytes()).endpoints

    def pids(self) -> dict[str, int]:
        """Return the process of each instance."""
        return recorded_pids(self.state_dir)

    def core_pid(self, engine: str) -> int:
        """Return the engine core of an engine's server."""
        (pid,) = child_pids(self.pids()[engine])
        return pid

    @contextmanager
    def frozen(self, *engines: str) -> Iterator[None]:
        """Within it these engines compute nothing: a stream stays where it is while a test looks at it."""
        cores = [self.core_pid(engine) for engine in engines]
        try:
            for core in cores:
                os.kill(core, signal.SIGSTOP)
            yield
        finally:
            for core in cores:
                with suppress(ProcessLookupError):  # it has ended with its server
                    os.kill(core, signal.SIGCONT)

    def all_pids(self) -> list[int]:
        """Return every process of the fleet: servers, their engine cores, the router."""
        instances = list(self.pids().values())
        return instances + [child for pid in instances for child in child_pids(pid)]

    def metrics(self, url: str) -> Mapping[str, float]:
        """Return every series of a process as Prometheus would write it, the label for the model left out."""
        found = {}
        for family in text_string_to_metric_families(self._http.get(f"{url}/metrics").text):
            for sample in family.samples:
                labels = ",".join(f'{k}="{v}"' for k, v in sample.labels.items() if k != "model_name")
                found[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
        return found

    def engine_metrics(self) -> dict[str, Mapping[str, float]]:
        """Return every engine's series."""
        return {one.id: self.metrics(one.url) for one in self.endpoints()}

    def received_blocks(self) -> float:
        """Return the blocks of K/V that decode engines have got from prefill engines."""
        name = "pagefleet_engine_kv_transfer_received_blocks_total"
        return sum(series.get(name, 0.0) for series in self.engine_metrics().values())
