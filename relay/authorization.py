"""Who may publish over HTTP: only with the bearer token, and only where nobody can read it."""

from __future__ import annotations

import hmac
import ipaddress

from aiohttp import web

from relay import respond


def refusal(request: web.BaseRequest, token: bytes | None, *, origin: bool) -> web.Response | None:
    """Return the answer to a request that may not publish, None if it may.

    Args:
        request: With its Authorization header.
        token: What it has to show; None where nobody may publish.
        origin: Whether this is an origin, where a token would help.
    """
    if token is None:
        where = "a --publish-token-file" if origin else "the origin"
        return respond.error_answer(403, "forbidden", f"publishing here needs {where}")
    transport = request.transport
    if transport is None or not is_private(
        transport.get_extra_info("peername"),
        tls=transport.get_extra_info("sslcontext") is not None,
    ):
        return respond.error_answer(
            403, "forbidden", "publishing needs TLS or loopback: the token would be readable"
        )
    scheme, _, given = request.headers.get("Authorization", "").partition(" ")
    shown = given.strip().encode("utf-8", "surrogateescape")
    if scheme.lower() != "bearer" or not hmac.compare_digest(shown, token):
        return respond.error_answer(
            401, "unauthorized", "wrong token", WWW_Authenticate='Bearer realm="shardcast"'
        )
    return None


def is_private(peer: object, *, tls: bool) -> bool:
    """Say whether nobody on the way can read a request: TLS, or this machine's loopback.

    Only the connection counts: headers such as X-Forwarded-For can be written by anyone.
    """
    if tls:
        return True
    if not isinstance(peer, tuple) or not peer:
        return False
    try:
        address = ipaddress.ip_address(str(peer[0]).partition("%")[0])
    except ValueError:
        return False
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback
