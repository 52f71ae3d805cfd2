"""The gRPC server to which gateways talk: one stream per request, and the health that they ask for."""

from __future__ import annotations

import datetime
import logging
from collections.abc import Iterator
from typing import Any

import grpc
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from pagefleet_router.errors import ConfigError
from pagefleet_router.picker.conversation import Conversation
from pagefleet_router.picker.ext_proc import SERVICE
from pagefleet_router.picker.picks import Picker
from pagefleet_router.picker.protobuf import WireError, integer, read_texts

__all__ = ["Picker", "PickerServer"]

logger = logging.getLogger(__name__)

HEALTH = "grpc.health.v1.Health"
LIVENESS, READINESS = "liveness", "readiness"
_SERVING, _NOT_SERVING = 1, 2
_MESSAGE_BYTES = 1024 * 1024
"""Beside a body that comes in one message."""
_PING_MS, _PONG_MS = 10_000, 5_000
"""A gateway whose machine is gone says no goodbye: a connection without an answer to a ping ends, with its requests."""
_MAX_STREAMS = 4096
"""Of one connection: gateways open another for more."""
CERTIFIED_NAME = "pagefleet-endpoint-picker"
_VALID = datetime.timedelta(days=3650)
_CLOCKS_APART = datetime.timedelta(days=1)


class PickerServer:
    """Answers gateways.

    Args:
        picker: what is asked.
        tls: whether to speak TLS, with a certificate of our own making that no gateway looks at.
        shared: whether other processes listen on the port, too.
    """

    def __init__(self, picker: Picker, *, tls: bool, shared: bool) -> None:
        self.picker = picker
        self._tls = tls
        self._shared = shared
        self._server: Any = None

    async def start(self, host: str, port: int) -> int:
        """Listen; returns the port.

        Raises:
            ConfigError: the address cannot be had.
        """
        options = [
            ("grpc.so_reuseport", int(self._shared)),
            ("grpc.max_receive_message_length", self.picker.max_body_bytes + _MESSAGE_BYTES),
            ("grpc.max_send_message_length", -1),
            ("grpc.max_concurrent_streams", _MAX_STREAMS),
            ("grpc.keepalive_time_ms", _PING_MS),
            ("grpc.keepalive_timeout_ms", _PONG_MS),
            ("grpc.http2.ping_timeout_ms", _PONG_MS),
            ("grpc.http2.max_pings_without_data", 0),
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.http2.min_ping_interval_without_data_ms", 5000),
        ]
        self._server = grpc.aio.server(options=options)
        self._server.add_generic_rpc_handlers(
            (
                grpc.method_handlers_generic_handler(
                    SERVICE, {"Process": grpc.stream_stream_rpc_method_handler(self._process)}
                ),
                grpc.method_handlers_generic_handler(
                    HEALTH, {"Check": grpc.unary_unary_rpc_method_handler(self._check)}
                ),
            )
        )
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        try:
            if self._tls:
                key, certificate = _self_signed()
                credentials = grpc.ssl_server_credentials([(key, certificate)])
                bound = int(self._server.add_secure_port(address, credentials))
            else:
                bound = int(self._server.add_insecure_port(address))
        except RuntimeError as error:
            raise ConfigError(f"{address} cannot be listened on: give another --endpoint-picker-port") from error
        await self._server.start()
        return bound

    async def stop(self, grace_s: float) -> None:
        """Take no new request, and end those that are still here after the grace."""
        if self._server is not None:
            await self._server.stop(grace_s)

    def tenants_inside(self) -> Iterator[str]:
        """Yield the tenant of each request that was let in and is not over."""
        return (one.view.tenant for one in self.picker.inside if one.is_inside)

    async def _process(self, _: object, context: Any) -> None:
        """Hold one conversation. It is cancelled when the gateway gives up."""
        conversation = Conversation(self.picker)
        try:
            while not conversation.is_over:
                data = await context.read()
                if data is grpc.aio.EOF:
                    return
                answers = await conversation.hear(data)
                del data  # it may hold a whole body, and the next word may take long
                while answers:
                    await context.write(answers.pop(0))
                conversation.said()
        except WireError as error:
            logger.warning("a gateway sent what is no ProcessingRequest: %s", error)
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"This is no ProcessingRequest: {error}.")
        finally:
            conversation.end()

    async def _check(self, request: bytes, context: Any) -> bytes:
        """Answer grpc.health.v1.Health/Check; an empty name stands for the server."""
        try:
            name = b"".join(read_texts(request, 1)).decode("utf-8", "replace")
        except WireError:
            name = "?"
        if name == LIVENESS:
            return integer(1, _SERVING)
        if name not in ("", READINESS, SERVICE):
            await context.abort(grpc.StatusCode.NOT_FOUND, "There is no such service.")
        return integer(1, _SERVING if self.picker.front.unready() is None else _NOT_SERVING)


def _self_signed() -> tuple[bytes, bytes]:
    """Return a new key and its certificate for CERTIFIED_NAME, both as PEM."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, CERTIFIED_NAME)])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _CLOCKS_APART)
        .not_valid_after(now + _VALID)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(CERTIFIED_NAME)]), critical=False)
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    plain = serialization.NoEncryption()
    return key.private_bytes(pem, serialization.PrivateFormat.PKCS8, plain), certificate.public_bytes(pem)
