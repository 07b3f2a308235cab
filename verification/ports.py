"""Ports for servers on this machine."""

import collections
import errno
import secrets
import socket

_PORTS = range(10_000, 29_000)
"""Below those that Linux usually gives to whoever asks for any (32768 and up), and below torchrun's own."""

_marks: collections.deque[socket.socket] = collections.deque(maxlen=64)


def free_port() -> int:
    """A TCP port of 127.0.0.1 on which nobody listens, and which the system usually gives to nobody else meanwhile.

    Nor does this function, as long as this process lives and draws fewer than 64 others: the server may listen much
    later. An abstract socket says that the port is taken; it belongs to the network namespace, as ports do.
    """
    while True:
        port = _PORTS[secrets.randbelow(len(_PORTS))]
        mark = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                mark.bind(f"\0diffusion-port-{port}")
                probe.bind(("127.0.0.1", port))
            except OSError as error:
                mark.close()
                if error.errno != errno.EADDRINUSE:
                    raise
                continue
        _marks.append(mark)
        return port
