"""Ports that several processes ask for at the same time."""

import socket

import pytest

from verification import ports
from verification.ports import free_port


def next_after(first: int, monkeypatch: pytest.MonkeyPatch) -> int:
    """What is given when `first` is drawn, and then those that follow it."""
    draws = iter(range(100))
    monkeypatch.setattr(ports, "_PORTS", range(first, first + 100))
    monkeypatch.setattr(ports.secrets, "randbelow", lambda limit: next(draws))
    return free_port()


def test_a_port_is_given_once_though_nobody_listens_yet(monkeypatch):
    first = free_port()
    assert next_after(first, monkeypatch) > first


def test_a_port_on_which_somebody_listens_is_left_out(monkeypatch):
    first = free_port()
    ports._marks.pop().close()
    with socket.create_server(("127.0.0.1", first)):
        assert next_after(first, monkeypatch) > first
    monkeypatch.undo()
    assert next_after(first, monkeypatch) == first
