"""The router's settings: one frozen dataclass. Flags, environment variables and YAML keys follow from its fields."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from pagefleet_protocol import headers
from pagefleet_protocol.trace_collector import TracesError, traces_url

from pagefleet_router.errors import ConfigError

PolicyName = Literal["auto", "prefix", "least-load", "session", "round-robin"]
PairFallback = Literal["recompute", "fail"]
_HEADER_NAME = re.compile(r"[a-z0-9-]{1,128}")
_DNS_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
POLICIES: tuple[PolicyName, ...] = ("auto", "prefix", "least-load", "session", "round-robin")
PAIR_FALLBACKS: tuple[PairFallback, ...] = ("recompute", "fail")


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig:
    """Everything `pagefleet route` can be told. Seconds and bytes, unless a name says otherwise.

    Raises:
        ConfigError: a value is out of its range, or no engines are named.
    """

    endpoints_file: Path | None = field(default=None, metadata={"help": "File of engines, re-read when it changes."})
    engine: tuple[str, ...] = field(
        default=(), metadata={"help": "URL of an engine, http://HOST:PORT; repeatable.", "metavar": "URL"}
    )
    kubernetes_service: str | None = field(
        default=None, metadata={"help": "Service whose pods are the engines, followed through its EndpointSlices."}
    )
    kubernetes_namespace: str | None = field(default=None, metadata={"help": "Of that Service; default: this pod's."})
    model_name: str | None = field(
        default=None, metadata={"help": "The model that the engines of --engine or --kubernetes-service serve."}
    )
    model_alias: tuple[str, ...] = field(
        default=(), metadata={"help": "Another name of the model of --model-name; repeatable.", "metavar": "NAME"}
    )
    host: str = field(default="127.0.0.1", metadata={"help": "Address to listen on."})
    port: int = field(default=8000, metadata={"help": "Port to listen on; 0 takes a free one."})
    workers: int = field(default=1, metadata={"help": "Processes that share the port."})
    policy: PolicyName = field(default="auto", metadata={"help": "How an engine is chosen.", "choices": POLICIES})
    session_header: str = field(
        default=headers.SESSION, metadata={"help": "Requests with the same value of this header prefer one engine."}
    )
    explain: bool = field(
        default=False, metadata={"help": f"Answer {headers.EXPLAIN}: 1 with the score of each engine."}
    )
    kv_events: bool = field(default=True, metadata={"help": "Follow the KV events of engines that publish them."})
    fleet_key_file: Path | None = field(
        default=None,
        metadata={"help": "File with the secret that engines and routers share, for KV events and transfers."},
    )
    pd_threshold: int = field(
        default=256, metadata={"help": "Uncached prompt tokens below which a decode engine computes them itself."}
    )
    pd_fallback: PairFallback = field(
        default="recompute",
        metadata={
            "help": "Where K/V does not come and no other prefill engine is left: the decode engine computes the "
            "prompt, or the request fails.",
            "choices": PAIR_FALLBACKS,
        },
    )
    api_key_file: Path | None = field(default=None, metadata={"help": "File of API keys, one a line."})
    drain_timeout: float = field(default=30.0, metadata={"help": "What running requests get after SIGTERM."})
    max_body_bytes: int = field(default=32 * 2**20, metadata={"help": "Largest request body."})
    max_concurrent: int = field(default=16384, metadata={"help": "Requests in flight; more are refused with 503."})
    queue_size: int = field(default=1024, metadata={"help": "Requests that wait for an engine with room; 0: none."})
    queue_timeout: float = field(default=60.0, metadata={"help": "Longest wait for an engine with room."})
    cold_start_timeout: float = field(
        default=0.0, metadata={"help": "Longest wait for the first engine of a model that has none; 0: no wait."}
    )
    max_connections: int = field(default=20000, metadata={"help": "Open client connections; more are closed at once."})
    connect_timeout: float = field(default=1.0, metadata={"help": "For a connection to an engine."})
    first_byte_timeout: float = field(default=0.0, metadata={"help": "Until an engine's answer begins; 0: no limit."})
    gap_timeout: float = field(default=120.0, metadata={"help": "Longest pause within an engine's answer."})
    prefix_pieces: int = field(default=262_144, metadata={"help": "Pieces of 512 bytes that the prefix index holds."})
    access_log: bool = field(default=False, metadata={"help": "One JSON line per request on standard output."})
    otlp_traces_endpoint: str | None = field(
        default=None, metadata={"help": "URL of an OpenTelemetry collector (OTLP over HTTP) that gets spans."}
    )
    otlp_traces_sample: float = field(
        default=1.0, metadata={"help": "Share of the requests that are traced; of a client's trace it decides."}
    )

    def __post_init__(self) -> None:
        """Check every field, and what belongs together."""
        self._check_choices()
        self._check_source()
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port is {self.port}: give 0 to 65535")
        for name in ("workers", "max_body_bytes", "max_concurrent", "max_connections", "prefix_pieces"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}: give a number above 0")
        self._check_traces()
        for name in ("queue_size", "pd_threshold"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} is {getattr(self, name)}: give a number from 0")
        if not _HEADER_NAME.fullmatch(self.session_header):
            raise ConfigError(f"session_header is {self.session_header[:80]!r}: give a header's name in lower case")
        may_be_zero_names = {"drain_timeout", "first_byte_timeout", "queue_timeout", "cold_start_timeout"}
        for name in ("connect_timeout", "gap_timeout", *sorted(may_be_zero_names)):
            value = getattr(self, name)
            may_be_zero = name in may_be_zero_names
            if not math.isfinite(value) or value < 0 or (value == 0 and not may_be_zero):
                raise ConfigError(f"{name} is {value:g}: give seconds {'from' if may_be_zero else 'above'} 0")

    def _check_choices(self) -> None:
        for one in fields(self):
            choices, value = one.metadata.get("choices", ()), getattr(self, one.name)
            if choices and value not in choices:
                raise ConfigError(f"{one.name} is {value!r}: give one of {', '.join(choices)}")

    def _check_traces(self) -> None:
        if not 0.0 <= self.otlp_traces_sample <= 1.0:
            raise ConfigError(f"otlp_traces_sample is {self.otlp_traces_sample:g}: give a share from 0 to 1")
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
        for flag in ("kubernetes_service", "kubernetes_namespace"):
            name = getattr(self, flag)
            if name is not None and not _DNS_LABEL.fullmatch(name):
                raise ConfigError(f"{flag} is {name[:80]!r}: give a Kubernetes name (lower-case letters, digits, '-')")
        if not all(self.model_alias):
            raise ConfigError("model_alias holds an empty name: give a name")


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


def setting_names() -> tuple[str, ...]:
    """Return every field's name."""
    return tuple(one.name for one in fields(RouterConfig))
