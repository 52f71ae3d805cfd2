"""A control plane of one's own for tests: etcd, kube-apiserver and, where there is one, kube-controller-manager.

Everything listens on loopback, lives in one folder and needs no root. There are no nodes: pods stay Pending, unless a
test writes their status itself. No test in here.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import signal
import ssl
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import httpx
import yaml

from tests.fakes.free_ports import free_ports

DEFAULT_FOLDER = Path("/usr/local/kubebuilder/bin")
NEEDED = ("etcd", "kube-apiserver")
CONTROLLERS = (
    "deployment-controller",
    "disruption-controller",
    "endpointslice-controller",
    "garbage-collector-controller",
    "job-controller",
    "namespace-controller",
    "replicaset-controller",
    "resourcequota-controller",
    "serviceaccount-controller",
)
READY_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 10.0
APPLY_PATCH = "application/apply-patch+yaml"


def binaries_folder(environment: Mapping[str, str] = os.environ) -> Path:
    """Return where Kubernetes' binaries are looked for; they need not be there."""
    return Path(environment.get("KUBEBUILDER_ASSETS") or DEFAULT_FOLDER)


def missing(folder: Path) -> str:
    """Return what keeps a control plane from being started here, as a sentence; empty when nothing does."""
    absent = [name for name in NEEDED if not os.access(folder / name, os.X_OK)]
    if absent:
        return f"{' and '.join(absent)} not in {folder}: set KUBEBUILDER_ASSETS to a folder with Kubernetes' binaries"
    if shutil.which("openssl") is None:
        return "the openssl command is needed for the key that signs ServiceAccounts' tokens"
    return ""


T = TypeVar("T")


class NotReady(Exception):
    """A component ended or did not become ready; the message holds the end of its log."""


class Component:
    """One process of the control plane, with a log file."""

    def __init__(self, name: str, command: Sequence[str], log: Path) -> None:
        self.name = name
        self._command = tuple(command)
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None, f"{self.name} has not been started"
        return self._process.pid

    def start(self) -> None:
        assert self._process is None, f"{self.name} runs already"
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(self._command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def stop(self, signal_number: int = signal.SIGTERM) -> None:
        """End the process; does nothing when it does not run."""
        if self._process is None:
            return
        process, self._process = self._process, None
        process.send_signal(signal.SIGCONT)  # a frozen process would never see the other signal
        process.send_signal(signal_number)
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def wait_until(self, is_ready: Callable[[], bool]) -> None:
        """Poll until ready. Raises NotReady with the last lines of the log."""
        assert self._process is not None
        deadline = time.monotonic() + READY_TIMEOUT_S
        while not is_ready():
            ended = self._process.poll()
            if ended is not None or time.monotonic() > deadline:
                why = f"ended with {ended}" if ended is not None else f"was not ready after {READY_TIMEOUT_S:g} s"
                lines = self._log.read_text(errors="replace").splitlines()[-15:]
                raise NotReady("\n".join([f"{self.name} {why}; its log ends with:", *lines]))
            time.sleep(0.02)


class ControlPlane:
    """A real API server with its store. Use as a context manager; `folder` has to exist and be empty.

    Authorization is RBAC. `admin_token` may do everything; `token_of` gives a ServiceAccount's own. Without controllers
    nobody makes the account `default` that pods need: make it, or disable the admission plugin `ServiceAccount`.
    """

    def __init__(
        self,
        folder: Path,
        binaries: Path,
        controllers: Sequence[str] = CONTROLLERS,
        disabled_admission: Sequence[str] = (),
    ) -> None:
        self._folder = folder
        self._binaries = binaries
        self._controllers = tuple(controllers)
        self._disabled_admission = tuple(disabled_admission)
        self._port = free_ports(3)
        self._etcd_url, self._peer_url = (f"http://127.0.0.1:{self._port + offset}" for offset in (1, 2))
        self.url = f"https://127.0.0.1:{self._port}"
        self.ca_file = folder / "tls" / "apiserver.crt"
        self.admin_token = secrets.token_hex(16)
        self._etcd = self._component("etcd", self._etcd_flags())
        self._api_server = self._component("kube-apiserver", self._api_server_flags())
        self._manager = self._component("kube-controller-manager", self._manager_flags())

    @property
    def has_controllers(self) -> bool:
        """Whether a controller manager runs: garbage is collected, namespaces end, Deployments make Pods."""
        return bool(self._controllers) and os.access(self._binaries / "kube-controller-manager", os.X_OK)

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """End every process; what was stored stays in the folder."""
        for component in (self._manager, self._api_server, self._etcd):
            component.stop(signal.SIGKILL)

    def stop_api_server(self, signal_number: int = signal.SIGKILL) -> None:
        """Take the API server away; the store and the controller manager keep running."""
        self._api_server.stop(signal_number)

    def start_api_server(self) -> None:
        """Bring the API server back on the same port, with the same certificate; returns when it is ready."""
        self._api_server.start()
        self._api_server.wait_until(self.is_ready)

    def freeze_api_server(self) -> None:
        """Let connections stay open and silent until `thaw_api_server`."""
        os.kill(self._api_server.pid, signal.SIGSTOP)

    def thaw_api_server(self) -> None:
        os.kill(self._api_server.pid, signal.SIGCONT)

    def is_ready(self) -> bool:
        if not self.ca_file.exists():
            return False
        with contextlib.suppress(httpx.HTTPError, OSError), self.client(self.admin_token, timeout_s=2) as client:
            return client.get("/readyz").status_code == 200
        return False

    def client(self, token: str | None = None, timeout_s: float = 30) -> httpx.Client:
        """Return a plain HTTP client for the API server; the administrator's without a token."""
        return httpx.Client(
            base_url=self.url,
            verify=ssl.create_default_context(cafile=str(self.ca_file)),
            headers={"Authorization": f"Bearer {token or self.admin_token}"},
            timeout=timeout_s,
            trust_env=False,
        )

    def token_of(self, namespace: str, service_account: str, valid_s: int = 3600) -> str:
        """Return a new token of a ServiceAccount, as its pods would get one (TokenRequest)."""
        path = f"/api/v1/namespaces/{namespace}/serviceaccounts/{service_account}/token"
        request = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest"}
        with self.client() as client:
            answer = client.post(path, json={**request, "spec": {"expirationSeconds": valid_s}})
        return str(answer.raise_for_status().json()["status"]["token"])

    def write_kubeconfig(self, path: Path, token: str | None = None, namespace: str = "default") -> Path:
        """Write a kubeconfig for the holder of `token`, the administrator without one; returns `path`."""
        cluster = {"server": self.url, "certificate-authority": str(self.ca_file)}
        document = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "test", "cluster": cluster}],
            "users": [{"name": "test", "user": {"token": token or self.admin_token}}],
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test", "namespace": namespace}}],
            "current-context": "test",
        }
        path.write_text(yaml.safe_dump(document))
        path.chmod(0o600)
        return path

    def _start(self) -> None:
        self._folder.joinpath("tokens.csv").write_text(f'{self.admin_token},admin,admin,"system:masters"\n')
        key = self._folder / "service-account.key"
        subprocess.run(["openssl", "genrsa", "-out", key, "2048"], check=True, capture_output=True)
        self._etcd.start()
        self._etcd.wait_until(self._etcd_is_healthy)
        self.start_api_server()
        if self.has_controllers:
            self.write_kubeconfig(self._folder / "kubeconfig")
            self._manager.start()
            self._manager.wait_until(self._default_account_exists)

    def _component(self, name: str, flags: Mapping[str, str]) -> Component:
        command = [str(self._binaries / name), *(f"--{flag}={value}" for flag, value in flags.items())]
        return Component(name, command, self._folder / f"{name}.log")

    def _etcd_is_healthy(self) -> bool:
        with contextlib.suppress(httpx.HTTPError):
            return httpx.get(f"{self._etcd_url}/health", trust_env=False, timeout=2).status_code == 200
        return False

    def _default_account_exists(self) -> bool:
        with self.client() as client:
            return client.get("/api/v1/namespaces/default/serviceaccounts/default").status_code == 200

    def _etcd_flags(self) -> dict[str, str]:
        return {
            "data-dir": str(self._folder / "etcd"),
            "listen-client-urls": self._etcd_url,
            "advertise-client-urls": self._etcd_url,
            "listen-peer-urls": self._peer_url,
            "initial-advertise-peer-urls": self._peer_url,
            "initial-cluster": f"default={self._peer_url}",
            "log-level": "warn",
            "unsafe-no-fsync": "true",  # what is stored ends with the test
        }

    def _api_server_flags(self) -> dict[str, str]:
        key = str(self._folder / "service-account.key")
        return {
            "etcd-servers": self._etcd_url,
            "bind-address": "127.0.0.1",
            "advertise-address": "127.0.0.1",
            "secure-port": str(self._port),
            "cert-dir": str(self.ca_file.parent),  # the server writes a certificate of its own here
            "token-auth-file": str(self._folder / "tokens.csv"),
            "authorization-mode": "RBAC",
            "service-cluster-ip-range": "10.96.0.0/16",
            "service-account-issuer": "https://kubernetes.default.svc",
            "service-account-key-file": key,
            "service-account-signing-key-file": key,
            "endpoint-reconciler-type": "none",
            "allow-privileged": "true",
            **({"disable-admission-plugins": ",".join(self._disabled_admission)} if self._disabled_admission else {}),
        }

    def _manager_flags(self) -> dict[str, str]:
        return {
            "kubeconfig": str(self._folder / "kubeconfig"),
            "controllers": ",".join(self._controllers),
            "service-account-private-key-file": str(self._folder / "service-account.key"),
            "leader-elect": "false",
            "secure-port": "0",
        }


def wait_until(look: Callable[[], T], timeout_s: float = 120) -> T:
    """Poll until `look` gives something truthy, and return it; a test fails after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while not (found := look()):
        assert time.monotonic() < deadline, f"not so after {timeout_s:g} s"
        time.sleep(0.05)
    return found


def apply(client: httpx.Client, path: str, document: Mapping[str, Any], manager: str = "test") -> httpx.Response:
    """Send one server-side apply that takes the fields from other managers."""
    return client.patch(
        path,
        params={"fieldManager": manager, "force": "true"},
        headers={"Content-Type": APPLY_PATCH},
        # JSON is YAML too, and leaves no doubt that a hash such as 35084765109256e8 is a string.
        content=json.dumps(document),
    )
