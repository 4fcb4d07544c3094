"""Listening sockets and successors: who gets which, and what is said of ports that are taken."""

import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from relay import notify
from relay.handover import BrokenError, decode, encode
from relay.listening import holder_of, listen, passed_sockets
from relay.successor import command_of, environment_of
from shardcast.errors import BusyError, UsageError


@contextmanager
def bound() -> Iterator[tuple[socket.socket, int]]:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        yield sock, sock.getsockname()[1]


def test_a_socket_of_the_same_address_is_used_as_it_is() -> None:
    with bound() as (sock, port):
        for wanted in (port, 0):
            found = listen(f"127.0.0.1:{wanted}", [sock.dup()])
            assert [s.getsockname()[1] for s in found.sockets] == [port]
            assert found.url == f"http://127.0.0.1:{port}"
            found.close()


def test_a_socket_of_another_address_is_closed_and_a_new_one_bound() -> None:
    with bound() as (sock, port):
        offered = sock.dup()
        found = listen("127.0.0.2:0", [offered])
        assert offered.fileno() == -1
        assert found.sockets[0].getsockname()[0] == "127.0.0.2"
        found.close()
        assert port


def test_a_port_in_use_is_told_with_who_has_it() -> None:
    with bound() as (_sock, port):
        assert holder_of(port) == (os.getpid(), Path("/proc/self/comm").read_text().strip())
        with pytest.raises(UsageError, match=rf"port {port} is in use by process {os.getpid()} "):
            listen(f"127.0.0.1:{port}")
    assert holder_of(port) is None


def test_a_port_just_closed_with_connections_can_be_had_again() -> None:
    first = listen("127.0.0.1:0")
    address = first.sockets[0].getsockname()
    client = socket.create_connection(address)
    first.sockets[0].setblocking(True)
    server, _address = first.sockets[0].accept()
    server.close()  # closed first at this side: TIME_WAIT here
    client.close()
    first.close()
    found = listen(f"127.0.0.1:{address[1]}")
    assert found.sockets[0].getsockname() == address
    found.close()


def test_unknown_hosts_and_foreign_addresses() -> None:
    with pytest.raises(UsageError, match="not known"):
        listen("no.such.host.invalid:0")
    with pytest.raises(UsageError, match=r"--listen 192\.0\.2\.1:0"):
        listen("192.0.2.1:0")


def test_sockets_are_passed_to_one_process_only() -> None:
    assert passed_sockets({}, 7) == []
    assert passed_sockets({"LISTEN_PID": "8", "LISTEN_FDS": "1"}, 7) == []
    assert passed_sockets({"LISTEN_PID": "7", "LISTEN_FDS": "x"}, 7) == []
    assert passed_sockets({"LISTEN_PID": "7"}, 7) == []


def test_a_successor_is_the_same_command_with_this_interpreter() -> None:
    argv = ["python", "-m", "shardcast", "relay", "--keep", "2"]
    assert command_of(argv, sys.executable) == [sys.executable, *argv[1:]]
    env = {"PATH": "/bin", "LISTEN_FDS": "1", "LISTEN_PID": "7", "NOTIFY_SOCKET": "@x"}
    assert environment_of(env) == {
        "PATH": "/bin",
        "NOTIFY_SOCKET": "@x",
        "SHARDCAST_RELAY_TAKE_OVER": "1",
    }


def test_messages_that_are_none() -> None:
    assert decode(encode("ready", kept=["a"]), "ready")["kept"] == ["a"]
    for data in (b"", b"[]", b"{", b'{"format": "other", "kind": "ready"}', b"\xff"):
        with pytest.raises(BrokenError, match=r"shardcast\.handover/1"):
            decode(data, "ready")
    with pytest.raises(BrokenError, match="'offer' instead of 'ready'"):
        decode(encode("offer"), "ready")
    with pytest.raises(BusyError, match="it is stopping"):
        decode(encode("refused", message="it is stopping"), "ready")


def test_nobody_to_notify(tmp_path: Path) -> None:
    assert not notify.notify(notify.READY, environment={})
    assert not notify.notify(notify.READY, environment={"NOTIFY_SOCKET": "relative"})
    gone = {"NOTIFY_SOCKET": str(tmp_path / "gone")}
    assert not notify.notify(notify.READY, environment=gone)
