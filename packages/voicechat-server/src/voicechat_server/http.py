"""One connection of the server's port: plain HTTP requests, or the upgrade to a WebSocket.

    await serve(stream, routes, talk, check=gate.refusal)

The header block is read with h11. A WebSocket request for ``/v1/realtime`` is checked here, line by line, and given to
``transport``; everything else is answered here: GET and HEAD of the four ``Routes``.

What a peer sends makes an answer or the end of its connection, never an exception. No answer holds a text of a library
or of an exception. What the routes say, who may come in and what is talked about are callables: no model here, no key.
"""

import json
import logging
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from email.utils import formatdate
from http import HTTPStatus
from typing import Final

import h11
import trio

from voicechat_server.auth import SUBPROTOCOL, Refusal, offered_subprotocols
from voicechat_server.transport import Handshake, SocketLimits, Transport, hang_up, remote_address, upgrade

__all__ = ["Answer", "HttpLimits", "Request", "Routes", "serve"]

_log: Final = logging.getLogger(__name__)

REALTIME: Final = "/v1/realtime"
METHODS: Final = ("GET", "HEAD")
VERSIONS: Final = (b"1.0", b"1.1")
WEBSOCKET_VERSION: Final = b"13"


@dataclass(frozen=True)
class Answer:
    """A response: ``content_type`` and the length are sent with it, ``headers`` besides."""

    status: int
    body: bytes
    content_type: str = "text/plain; charset=utf-8"
    headers: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Request:
    """A request's header block. What may hold a key is not in its ``repr``.

    Attributes:
        method: as it came, GET for instance.
        path: from the first slash, without the query, not decoded.
        query: what follows the question mark.
        headers: (lower-case name, value), in their order.
        has_body: a body follows, which nobody reads.
    """

    method: str
    path: str
    query: str = field(repr=False)
    headers: tuple[tuple[bytes, bytes], ...] = field(repr=False)
    has_body: bool = False

    def values(self, name: bytes) -> list[bytes]:
        """The values of all headers of that lower-case name."""
        return [value for key, value in self.headers if key == name]

    def lists(self, name: bytes, item: bytes) -> bool:
        """Whether ``item`` is one of those that a header with a list of names gives, in any case."""
        items = b",".join(self.values(name)).lower().split(b",")
        return item in (each.strip() for each in items)


@dataclass(frozen=True)
class Routes:
    """What is answered at each path."""

    health: Callable[[], Awaitable[Answer]]
    ready: Callable[[], Awaitable[Answer]]
    metrics: Callable[[], Awaitable[Answer]]
    home: Callable[[], Awaitable[Answer]]

    def at(self, path: str) -> Callable[[], Awaitable[Answer]] | None:
        """The route of a path, None if there is none."""
        routes = {"/health": self.health, "/ready": self.ready, "/metrics": self.metrics, "/": self.home}
        return routes.get(path)


@dataclass(frozen=True)
class HttpLimits:
    """Of one connection.

    Attributes:
        header_bytes: of a request's header block. Browsers send one or two KiB, cookies of other servers at the same
            host included; 16 KiB is what most servers take.
        header_seconds: for the whole block, from the connection's or the last answer's time on. A slow network needs
            one or two; a peer that sends a byte now and then holds a socket no longer.
        answer_seconds: for a route; they answer from what is known, and ask the model's thread at most.
        write_seconds: for the peer to take an answer of some KiB.
    """

    header_bytes: int = 16 * 1024
    header_seconds: float = 10.0
    answer_seconds: float = 10.0
    write_seconds: float = 10.0


Check = Callable[[tuple[tuple[bytes, bytes], ...]], Refusal | None]
Conversation = Callable[[Transport, Request], Awaitable[None]]


async def serve(
    stream: trio.abc.Stream,
    routes: Routes,
    talk: Conversation,
    *,
    check: Check,
    limits: HttpLimits | None = None,
    socket_limits: SocketLimits | None = None,
) -> None:
    """Serve one connection until it ends, and close it. Raises nothing but Cancelled.

    Args:
        stream: accepted, its TLS handshake done or not.
        routes: for plain HTTP.
        talk: is given each WebSocket, and the request that it began with.
        check: says of the headers of an upgrade request why it is refused, if it is.
        limits: of HTTP.
        socket_limits: of a WebSocket.
    """
    try:
        await _Connection(stream, routes, talk, check, limits or HttpLimits(), socket_limits).run()
    except* (trio.BrokenResourceError, trio.ClosedResourceError):
        _log.debug("%s: left", remote_address(stream))
    except* Exception:
        _log.exception("%s: the connection failed", remote_address(stream))
    finally:
        await hang_up(stream)


class _Connection:
    """The requests of one connection, one after the other."""

    def __init__(
        self,
        stream: trio.abc.Stream,
        routes: Routes,
        talk: Conversation,
        check: Check,
        limits: HttpLimits,
        socket_limits: SocketLimits | None,
    ) -> None:
        self._stream = stream
        self._routes = routes
        self._talk = talk
        self._check = check
        self._limits = limits
        self._socket_limits = socket_limits
        # One less: h11 refuses what is incomplete above its limit, and we never hold more than ours.
        self._http = h11.Connection(h11.SERVER, max_incomplete_event_size=limits.header_bytes - 1)

    async def run(self) -> None:
        """Until the peer has enough, or makes a mistake after which nothing can be understood."""
        while True:
            request = await self._read_request()
            if isinstance(request, Answer):
                return await self._send(request, last=True)
            if request is None:
                return None
            if request.lists(b"upgrade", b"websocket"):
                return await self._upgrade(request)
            answer = await self._answer(request)
            await self._send(answer, last=request.has_body, body=request.method != "HEAD")
            if self._http.our_state is not h11.DONE or self._http.their_state is not h11.DONE:
                return None
            self._http.start_next_cycle()

    # ---- reading

    async def _read_request(self) -> Request | Answer | None:
        """The next request; what is answered to something else; None when the peer has left or said nothing."""
        try:
            with trio.move_on_after(self._limits.header_seconds):
                return await self._read_header_block()
        except h11.RemoteProtocolError as error:  # its text is not ours to send
            known = {408, 431, 501}
            return _plain(error.error_status_hint if error.error_status_hint in known else 400)
        return _plain(408) if self._http.trailing_data[0] else None

    async def _read_header_block(self) -> Request | Answer | None:
        while True:
            event = self._http.next_event()
            if isinstance(event, h11.Request):
                return self._request(event) if event.http_version in VERSIONS else _plain(505)
            if event is not h11.NEED_DATA:
                return None
            room = self._limits.header_bytes - len(self._http.trailing_data[0])
            self._http.receive_data(bytes(await self._stream.receive_some(room)))

    def _request(self, event: h11.Request) -> Request:
        target = re.sub(r"^https?://[^/?]*", "", event.target.decode("ascii"), flags=re.IGNORECASE)
        path, _, query = target.partition("?")
        headers = tuple((bytes(name), bytes(value)) for name, value in event.headers)
        has_body = not isinstance(self._http.next_event(), h11.EndOfMessage)
        return Request(event.method.decode("ascii"), path or "/", query, headers, has_body)

    # ---- plain HTTP

    async def _answer(self, request: Request) -> Answer:
        if request.path == REALTIME:
            return self._not_a_websocket(request)
        route = self._routes.at(request.path)
        if route is None:
            return _plain(404)
        if request.method not in METHODS:
            return _plain(405, ("Allow", ", ".join(METHODS)))
        return await self._ask(route)

    def _not_a_websocket(self, request: Request) -> Answer:
        if request.method not in METHODS:
            return _plain(405, ("Allow", "GET"))
        return _plain(426, ("Upgrade", "websocket"), ("Connection", "Upgrade"))

    async def _ask(self, route: Callable[[], Awaitable[Answer]]) -> Answer:
        try:
            with trio.move_on_after(self._limits.answer_seconds):
                return await route()
        except Exception:
            _log.exception("%s: a route failed", remote_address(self._stream))
            return _plain(500)
        return _plain(503)

    async def _send(self, answer: Answer, *, last: bool, body: bool = True) -> None:
        """Write an answer, and that it is the ``last`` one; not its body where only its header is asked for."""
        headers = [
            ("Date", formatdate(usegmt=True)),
            ("Content-Type", answer.content_type),
            ("Content-Length", str(len(answer.body))),
            ("Cache-Control", "no-store"),
            ("X-Content-Type-Options", "nosniff"),
            *answer.headers,
            *([("Connection", "close")] if last else []),
        ]
        reason = HTTPStatus(answer.status).phrase
        head = h11.Response(status_code=answer.status, headers=headers, reason=reason)
        events = [head, *([h11.Data(data=answer.body)] if body else []), h11.EndOfMessage()]
        data = b"".join(self._http.send(event) or b"" for event in events)
        with trio.move_on_after(self._limits.write_seconds) as scope:
            await self._stream.send_all(data)
        if scope.cancelled_caught:
            raise trio.BrokenResourceError("the peer does not read")

    # ---- the upgrade

    async def _upgrade(self, request: Request) -> None:
        refused = self._refused(request)
        if refused is not None:
            return await self._send(refused, last=True, body=request.method != "HEAD")
        subprotocol = SUBPROTOCOL if SUBPROTOCOL.encode() in offered_subprotocols(request.headers) else None
        key = request.values(b"sec-websocket-key")[0].decode("ascii")
        handshake = Handshake(REALTIME, key, subprotocol, early=self._http.trailing_data[0])

        async def talk(socket: Transport) -> None:
            await self._talk(socket, request)

        return await upgrade(self._stream, handshake, talk, limits=self._socket_limits)

    def _refused(self, request: Request) -> Answer | None:
        if request.path != REALTIME:
            return _plain(404)
        if request.method != "GET":
            return _plain(405, ("Allow", "GET"))
        refusal = self._check(request.headers)
        if refusal is not None:
            challenge = [("WWW-Authenticate", "Bearer")] if refusal.status == 401 else []
            return _json_error(refusal.status, refusal.message, *challenge)
        if request.values(b"sec-websocket-version") != [WEBSOCKET_VERSION]:
            return _plain(426, ("Sec-WebSocket-Version", "13"), ("Upgrade", "websocket"))
        keys = request.values(b"sec-websocket-key")
        complete = len(keys) == 1 and re.fullmatch(rb"[A-Za-z0-9+/]{22}==", keys[0])
        if not complete or not request.lists(b"connection", b"upgrade") or request.has_body:
            return _plain(400)
        return None


def _plain(status: int, *headers: tuple[str, str]) -> Answer:
    """A status in words, and nothing else."""
    return Answer(status, f"{status} {HTTPStatus(status).phrase}\n".encode(), headers=headers)


def _json_error(status: int, message: str, *headers: tuple[str, str]) -> Answer:
    body = {"error": {"message": message, "type": "invalid_request_error"}}
    return Answer(status, json.dumps(body).encode(), "application/json", headers)
