"""Links pass bytes on, stand still, break, and mend."""

import socket
from collections.abc import Iterator

import pytest

from loadtest.links import Link, Links

TIMEOUT_S = 10.0


@pytest.fixture
def server() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(TIMEOUT_S)
        yield listener


@pytest.fixture
def link(server: socket.socket) -> Iterator[Link]:
    with Links() as links:
        yield links.add(f"http://127.0.0.1:{server.getsockname()[1]}")


def dial(link: Link) -> socket.socket:
    return socket.create_connection(("127.0.0.1", int(link.url.rpartition(":")[2])), TIMEOUT_S)


def ended(sock: socket.socket) -> bool:
    try:
        return sock.recv(1) == b""
    except ConnectionResetError:
        return True


def test_bytes_pass_in_both_directions(server: socket.socket, link: Link) -> None:
    with dial(link) as client:
        client.sendall(b"question")
        with server.accept()[0] as upper:
            upper.settimeout(TIMEOUT_S)
            assert upper.recv(100) == b"question"
            upper.sendall(b"answer")
            assert client.recv(100) == b"answer"


def test_a_frozen_link_keeps_what_it_was_given_until_it_is_mended(
    server: socket.socket, link: Link
) -> None:
    with dial(link) as client:
        client.sendall(b"1")
        with server.accept()[0] as upper:
            upper.settimeout(TIMEOUT_S)
            assert upper.recv(1) == b"1"
            link.freeze()
            client.sendall(b"2")
            upper.settimeout(0.2)
            with pytest.raises(TimeoutError):
                upper.recv(1)
            link.mend()
            upper.settimeout(TIMEOUT_S)
            assert upper.recv(1) == b"2"


def test_a_cut_link_breaks_what_is_open_and_what_comes_until_it_is_mended(
    server: socket.socket, link: Link
) -> None:
    with dial(link) as client:
        client.sendall(b"1")
        with server.accept()[0] as upper:
            upper.settimeout(TIMEOUT_S)
            assert upper.recv(1) == b"1"
            link.cut()
            assert ended(client)
            assert ended(upper)
    with dial(link) as refused:
        refused.settimeout(TIMEOUT_S)
        assert ended(refused)
    link.mend()
    with dial(link) as client:
        client.sendall(b"3")
        with server.accept()[0] as upper:
            upper.settimeout(TIMEOUT_S)
            assert upper.recv(1) == b"3"
