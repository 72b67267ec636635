"""Who may talk: an API key, the Origin of a web page, and where a server may listen without a key.

    gate = Gate(read_key(path, os.environ), origins=("https://example.org",))
    require_safe_listening(host, gate.key, insecure=False)
    refusal = gate.refusal(headers)  # of a request; None if it may come in

Knows no socket and no HTTP but header lines, as (lower-case name, value) in bytes. A key appears in no message, no
``repr`` and no log.
"""

import ipaddress
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

from voicechat_core.errors import InputError
from voicechat_core.keys import KEY_VARIABLE, Key, read_key

__all__ = ["KEY_VARIABLE", "Gate", "Key", "Refusal", "offered_subprotocols", "read_key", "require_safe_listening"]

Headers = Iterable[tuple[bytes, bytes]]

SUBPROTOCOL: Final = "realtime"  # the one that we answer with
KEY_SUBPROTOCOL: Final = b"openai-insecure-api-key."  # a browser cannot send other headers
PORTS: Final = {"http": 80, "https": 443}


@dataclass(frozen=True)
class Refusal:
    """What is answered instead of the upgrade: an HTTP status, and a text that is safe to send."""

    status: int
    message: str


@dataclass(frozen=True)
class Origin:
    """Of a web page: scheme, host without brackets, port."""

    scheme: str
    host: str
    port: int


# ---- where to listen


def require_safe_listening(host: str, key: Key | None, *, insecure: bool) -> None:
    """Whoever reaches the server may use it, where there is no key. So without one it listens on loopback only.

    Args:
        host: an address, or a name. Of names only ``localhost`` is loopback: what others lead to can change.
        key: the key, if there is one.
        insecure: the operator wants it all the same.

    Raises:
        InputError: when ``host`` is not loopback, and neither of the others is given.
    """
    if key is None and not insecure and not _is_loopback(host):
        where = host or "every address"
        raise InputError(f"listening on {where} without an API key lets anybody in; give a key, or --insecure")


def _is_loopback(host: str) -> bool:
    if host.lower() == "localhost":
        return True
    try:
        address = ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return False
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback


# ---- a request


class Gate:
    """Decides about requests for a conversation."""

    def __init__(self, key: Key | None, *, origins: Iterable[str] = ()) -> None:
        """``origins`` are those of web pages that may connect, as browsers spell them: ``https://example.org:8443``.

        Raises:
            InputError: when one of them is no origin.
        """
        self.key = key
        self._origins = frozenset(_checked_origin(text) for text in origins)

    def refusal(self, headers: Headers) -> Refusal | None:
        """Why this request may not come in, None if it may. The key goes first: without it nothing else is told."""
        lines = list(headers)
        if self.key is not None and not any(self.key.matches(candidate) for candidate in _keys(lines)):
            return Refusal(401, "a valid API key is needed for /v1/realtime")
        if not self._allows_origin(lines):
            return Refusal(403, "origin not allowed for /v1/realtime")
        return None

    def _allows_origin(self, headers: list[tuple[bytes, bytes]]) -> bool:
        """Programs send no Origin, and may come in. A browser always does, so that no page can use its reader's server.

        A page that this server gave out may, and any page of the reader's own machine. Without a key, the server's
        name has to be an address for that: anybody can let a name of theirs lead here.
        """
        values = _values(headers, b"origin")
        if not values:
            return True
        origin = _parse_origin(values[0]) if len(values) == 1 else None
        if origin is None:
            return False
        if origin in self._origins or _is_loopback(origin.host):
            return True
        hosts = _values(headers, b"host")
        here = _parse_host(hosts[0], origin.scheme) if len(hosts) == 1 else None
        return here == origin and (self.key is not None or _is_address(origin.host))


def offered_subprotocols(headers: Headers) -> list[bytes]:
    """What ``Sec-WebSocket-Protocol`` lists. It may hold a key: to be compared, not to be shown."""
    lists = _values(list(headers), b"sec-websocket-protocol")
    return [name.strip() for line in lists for name in line.split(b",") if name.strip()]


def _keys(headers: list[tuple[bytes, bytes]]) -> list[bytes]:
    """What is offered as a key: Bearer tokens, and beside the subprotocol ``realtime`` a browser's."""
    words = [value.split(None, 1) for value in _values(headers, b"authorization")]
    tokens = [pair[1].strip() for pair in words if len(pair) == 2 and pair[0].lower() == b"bearer"]
    offered = offered_subprotocols(headers)
    if SUBPROTOCOL.encode() in offered:
        tokens += [name.removeprefix(KEY_SUBPROTOCOL) for name in offered if name.startswith(KEY_SUBPROTOCOL)]
    return tokens


def _values(headers: list[tuple[bytes, bytes]], name: bytes) -> list[bytes]:
    return [value for key, value in headers if key == name]


# ---- origins


def _checked_origin(text: str) -> Origin:
    origin = _parse_origin(text.encode("utf-8"))
    if origin is None:
        raise InputError(f"{text!r} is no origin; one looks like https://example.org or http://example.org:8000")
    return origin


def _parse_origin(value: bytes) -> Origin | None:
    """Scheme, host and port, the port never None; None for what no page of the web has, such as ``null``."""
    match = re.fullmatch(r"(https?)://(.+)", value.decode("latin-1").lower())
    return _parse_host(match[2].encode("latin-1"), match[1]) if match else None


def _parse_host(value: bytes, scheme: str) -> Origin | None:
    """``Host``, as a page that was loaded by ``scheme`` from there has it for its origin."""
    text = value.decode("latin-1").lower()
    if not re.fullmatch(r"[a-z0-9._-]+(:\d+)?|\[[0-9a-f:.]+\](:\d+)?", text):
        return None
    try:
        parts = urlsplit(f"{scheme}://{text}")
        port = parts.port
    except ValueError:
        return None
    return Origin(scheme, parts.hostname or "", PORTS[scheme] if port is None else port)


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
