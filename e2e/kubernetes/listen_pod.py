"""Runs in a pod: listens on an engine's event port without a key, with another fleet's, and with the fleet's own.

Each line says how many messages each of the three has heard so far.
"""

from __future__ import annotations

import json
import secrets
import sys
import time
from pathlib import Path

import zmq
from pagefleet_protocol.fleet_key import FleetKey, read_fleet_key
from zmq.utils import z85

PRINT_S = 0.5


def listener(context: zmq.Context[zmq.Socket[bytes]], address: str, key: FleetKey | None) -> zmq.Socket[bytes]:
    """Return a socket that hears everything it is let hear."""
    socket = context.socket(zmq.SUB)
    socket.setsockopt(zmq.SUBSCRIBE, b"")
    if key is not None:
        secret = z85.encode(key.curve_secret("router"))
        socket.setsockopt(zmq.CURVE_SECRETKEY, secret)
        socket.setsockopt(zmq.CURVE_PUBLICKEY, zmq.curve_public(secret))
        socket.setsockopt(zmq.CURVE_SERVERKEY, zmq.curve_public(z85.encode(key.curve_secret("engine"))))
    socket.connect(address)
    return socket


def main(address: str, key_file: str) -> None:
    context = zmq.Context()
    keys = {"none": None, "another": FleetKey(secrets.token_bytes(32)), "own": read_fleet_key(Path(key_file))}
    listeners = {name: listener(context, address, key) for name, key in keys.items()}
    heard = dict.fromkeys(listeners, 0)
    while True:
        for name, socket in listeners.items():
            while socket.poll(0):
                socket.recv_multipart()
                heard[name] += 1
        print(json.dumps(heard), flush=True)
        time.sleep(PRINT_S)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
