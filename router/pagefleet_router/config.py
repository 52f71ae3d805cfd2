"""The settings of `pagefleet route`: one frozen dataclass, whose field docstrings are the help."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pagefleet_protocol import headers
from pagefleet_protocol.cors import CorsError, allow
from pagefleet_protocol.settings.fields import (
    Between,
    Bytes,
    Count,
    HostName,
    Port,
    Seconds,
    Share,
    Shown,
    check_limits,
)
from pagefleet_protocol.trace_collector import TracesError, traces_url

from pagefleet_router.errors import ConfigError

PolicyName = Literal["auto", "prefix", "least-load", "session", "round-robin"]
PairFallback = Literal["recompute", "fail"]
_NotNegative = Annotated[int, Between(0)]
_Pause = Annotated[Seconds, Between(0)]
_Wait = Annotated[Seconds, Between(0, over=True)]
_HEADER_NAME = re.compile(r"[a-z0-9-]{1,128}")
_DNS_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
_DNS_NAME = re.compile(r"[a-z0-9]([-.a-z0-9]{0,251}[a-z0-9])?")


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig:
    """Everything `pagefleet route` can be told. Seconds and bytes, unless a name says otherwise.

    Raises:
        ConfigError: a value is out of its range, or no engines are named.
    """

    endpoints_file: Path | None = None
    """File of engines, re-read when it changes."""
    engine: Annotated[tuple[str, ...], Shown("URL")] = ()
    """URL of an engine, http://HOST:PORT."""
    kubernetes_service: str | None = None
    """Service whose pods are the engines, followed through its EndpointSlices."""
    kubernetes_namespace: str | None = None
    """Of that Service; default: this pod's."""
    model_name: str | None = None
    """The model that the engines of --engine or --kubernetes-service serve."""
    model_alias: Annotated[tuple[str, ...], Shown("NAME")] = ()
    """Another name of the model of --model-name."""
    host: HostName = "127.0.0.1"
    """Address to listen on."""
    port: Port = 8000
    """Port to listen on; 0 takes a free one."""
    workers: Count = 1
    """Processes that share the port."""
    endpoint_picker_port: Annotated[int, Between(1, 65535)] | None = None
    """Port on which gateways ask where requests go (Gateway API Inference Extension); default: none."""
    endpoint_picker_tls: bool = True
    """Speak TLS there, with a certificate made at the start."""
    policy: PolicyName = "auto"
    """How an engine is chosen."""
    session_header: str = headers.SESSION
    """Requests with the same value of this header prefer one engine."""
    explain: bool = False
    """Answer x-pagefleet-explain: 1 with the score of each engine."""
    kv_events: bool = True
    """Follow the KV events of engines that publish them."""
    fleet_key_file: Path | None = None
    """File with the secret that engines and routers share, for KV events and transfers."""
    pd_threshold: _NotNegative = 256
    """Uncached prompt tokens below which a decode engine computes them itself."""
    pd_fallback: PairFallback = "recompute"
    """Where K/V does not come and no other prefill engine is left: the decode engine computes the prompt, or the
    request fails."""
    api_key_file: Path | None = None
    """File of API keys, one a line."""
    console: bool = True
    """Serve a page for browsers at /, and what it shows at /console/state."""
    cors_origins: Annotated[tuple[str, ...], Shown("ORIGIN")] = ()
    """Origin whose web pages may call this server, e.g. https://chat.example.com, or *."""
    inference_service: str | None = None
    """InferenceService of this router, in the namespace of --kubernetes-service: the console shows its status."""
    inference_service_file: Path | None = None
    """File with the InferenceService of this router and its status, outside a cluster."""
    drain_timeout: _Pause = 30.0
    """What running requests get after SIGTERM."""
    max_body_bytes: Annotated[Bytes, Between(1)] = 32 * 2**20
    """Largest request body."""
    max_concurrent: Count = 16384
    """Requests in flight; more are refused with 503."""
    queue_size: _NotNegative = 1024
    """Requests that wait for an engine with room; 0: none."""
    queue_timeout: _Pause = 60.0
    """Longest wait for an engine with room."""
    cold_start_timeout: _Pause = 0.0
    """Longest wait for the first engine of a model that has none; 0: no wait."""
    max_connections: Count = 20000
    """Open client connections; more are closed at once."""
    connect_timeout: _Wait = 1.0
    """For a connection to an engine."""
    first_byte_timeout: _Pause = 0.0
    """Until an engine's answer begins; 0: no limit."""
    gap_timeout: _Wait = 120.0
    """Longest pause within an engine's answer."""
    prefix_pieces: Count = 262_144
    """Pieces of 512 bytes that the prefix index holds."""
    access_log: bool = False
    """One JSON line per request on standard output."""
    otlp_traces_endpoint: str | None = None
    """URL of an OpenTelemetry collector (OTLP over HTTP) that gets spans."""
    otlp_traces_sample: Share = 1.0
    """Share of the requests that are traced; of a client's trace it decides."""

    def __post_init__(self) -> None:
        """Check every field, and what belongs together."""
        check_limits(self, ConfigError)
        self._check_source()
        if not _HEADER_NAME.fullmatch(self.session_header):
            raise ConfigError(f"session_header is {self.session_header[:80]!r}: give a header's name in lower case")
        try:
            allow(self.cors_origins)
        except CorsError as error:
            raise ConfigError(f"cors_origins {error}") from None
        try:
            if self.otlp_traces_endpoint is not None:
                traces_url(self.otlp_traces_endpoint)
        except TracesError as error:
            raise ConfigError(f"otlp_traces_endpoint {error}") from None

    def _check_source(self) -> None:
        if sum((self.endpoints_file is not None, bool(self.engine), self.kubernetes_service is not None)) != 1:
            raise ConfigError(
                "give one of --endpoints-file FILE, --engine URL (which may be repeated) and --kubernetes-service NAME"
            )
        for flag in ("engine", "kubernetes_service", "model_alias"):
            if getattr(self, flag) and not self.model_name:
                name = flag.replace("_", "-")
                raise ConfigError(f"--{name} needs --model-name NAME: the name that clients put into `model`")
        for url in self.engine:
            check_engine_url(url)
        if self.kubernetes_namespace is not None and self.kubernetes_service is None:
            raise ConfigError("--kubernetes-namespace says where --kubernetes-service NAME is: give that too")
        if self.inference_service is not None and self.kubernetes_service is None:
            raise ConfigError("--inference-service is read from a cluster: give --kubernetes-service NAME too")
        for flag, pattern in (
            ("kubernetes_service", _DNS_LABEL), ("kubernetes_namespace", _DNS_LABEL), ("inference_service", _DNS_NAME),
        ):  # fmt: skip
            name = getattr(self, flag)
            if name is not None and not pattern.fullmatch(name):
                raise ConfigError(f"{flag} is {name[:80]!r}: give a Kubernetes name (lower-case letters, digits, '-')")


def check_engine_url(url: str) -> tuple[str, int]:
    """Return host and port of an engine's base URL.

    Raises:
        ConfigError: it is not of the form http://HOST:PORT.
    """
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        host = port = None
    if not host or not port or url not in (f"http://{host}:{port}", f"http://[{host}]:{port}"):
        raise ConfigError(f"engine {url!r} is not a base URL: write http://HOST:PORT")
    return host, port
