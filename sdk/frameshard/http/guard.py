"""Who may ask. Checked before a body is read: that its end is clear, Host and Origin against web pages of other sites,
then the key."""

from __future__ import annotations

import hmac
import re
from collections.abc import Collection
from dataclasses import dataclass

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from frameshard.http.refusal import Refusal

LOOPBACK = ("localhost", "127.0.0.1", "[::1]")
OPEN = ("/health",)
"""Paths that need no key: they say only whether requests would be answered."""

MAX_HEADER_BYTES = 16 << 10
"""Of one request, with a few for the signs between names and values."""

_HOST = re.compile(r"(\[[0-9a-fA-F:.]+\]|[^:\[\]]+)(?::[0-9]+)?")


@dataclass(frozen=True)
class Access:
    """Who may ask.

    :param key: the bearer key; None: anyone who reaches the port.
    :param hosts: the names under which this server may be addressed, in small letters.
    :param origins: the origins of web pages that may ask, such as ``http://localhost:3000``.
    """

    key: str | None
    hosts: Collection[str] = LOOPBACK
    origins: Collection[str] = ()


class Guard:
    """An ASGI application around another one, which sees only requests that may be made."""

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self._app = app
        self._access = access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = refused(self._access, scope["path"], Headers(scope=scope))
        await (self._app if refusal is None else refusal.response())(scope, receive, send)


def refused(access: Access, path: str, headers: Headers) -> Refusal | None:
    """Why a request may not be made; None: it may."""
    if sum(len(name) + len(value) + len(": \r\n") for name, value in headers.raw) > MAX_HEADER_BYTES:
        return Refusal(431, f"the headers have more than {MAX_HEADER_BYTES} bytes", "headers_too_large")
    if "transfer-encoding" in headers and "content-length" in headers:
        # A proxy in front may see the end of this request elsewhere (request smuggling), so nothing behind it is read.
        message = "a request has a Content-Length or a Transfer-Encoding, not both"
        return Refusal(400, message, "bad_framing", headers={"Connection": "close"})
    hosts = headers.getlist("host")
    match = _HOST.fullmatch(hosts[0]) if len(hosts) == 1 else None
    if match is None or match[1].lower() not in access.hosts:
        # A page of another site can reach a loopback port under a name of its own (DNS rebinding).
        return Refusal(403, "this server is not addressed by that Host: name it with --allow-host", "host_not_allowed")
    if any(origin not in access.origins for origin in headers.getlist("origin")):
        return Refusal(403, "pages of this Origin may not ask: name it with --allow-origin", "origin_not_allowed")
    if access.key is None or path in OPEN:
        return None
    scheme, _, given = headers.get("authorization", "").partition(" ")
    if not given:
        return _unauthorized("there is no key: send the header Authorization: Bearer KEY")
    # Headers are read as Latin-1, so this gives the bytes that were sent.
    if scheme.lower() != "bearer" or not hmac.compare_digest(given.strip().encode("latin-1"), access.key.encode()):
        return _unauthorized("the key is wrong")
    return None


def _unauthorized(message: str) -> Refusal:
    return Refusal(401, message, "invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
