"""Ports for servers on this machine."""

import secrets
import socket

_PORTS = range(10_000, 29_000)
"""Below those that Linux usually gives to whoever asks for any (32768 and up), and below torchrun's own."""


def free_port() -> int:
    """A TCP port of 127.0.0.1 on which nobody listens, and which the system usually gives to nobody else meanwhile."""
    while True:
        port = _PORTS[secrets.randbelow(len(_PORTS))]
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port
