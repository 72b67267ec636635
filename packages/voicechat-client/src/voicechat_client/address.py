"""Where a server is, from what a person writes. No I/O.

parse("127.0.0.1:8080")                 ws://127.0.0.1:8080/v1/realtime
parse("https://talk.example.org")       wss://talk.example.org/v1/realtime
parse("wss://example.org/voice/v1/realtime?model=11b")      as it is
"""

import ipaddress
import re
from dataclasses import dataclass
from typing import Final
from urllib.parse import SplitResult, urlsplit

from voicechat_client.errors import UrlError
from voicechat_core.terminal import printable

__all__ = ["Address", "parse"]

REALTIME: Final = "/v1/realtime"
SERVER_PORT: Final = 8080  # a voicechat server's own, where neither scheme nor port is written
SCHEMES: Final = {"ws": ("ws", 80), "http": ("ws", 80), "wss": ("wss", 443), "https": ("wss", 443)}
EXAMPLE: Final = "one looks like ws://127.0.0.1:8080 or wss://example.org/v1/realtime"
SHOWN: Final = 100  # characters of an address in an error


@dataclass(frozen=True)
class Address:
    """Where to connect to.

    Attributes:
        tls: whether to speak TLS.
        host: a name in ASCII, or an IP address without brackets.
        port: 1 to 65535.
        target: path and query, in visible ASCII.
    """

    tls: bool
    host: str
    port: int
    target: str

    @property
    def place(self) -> str:
        """``host:port``, as the ``Host`` header has it: without the port where it goes without saying."""
        host = f"[{self.host.split('%')[0]}]" if ":" in self.host else self.host
        return host if self.port == (443 if self.tls else 80) else f"{host}:{self.port}"

    def __str__(self) -> str:
        return f"{'wss' if self.tls else 'ws'}://{self.place}{self.target}"


def parse(text: str) -> Address:
    """The address that ``text`` means. Without a path it is completed by ``/v1/realtime``.

    Raises:
        UrlError: naming what is wrong with it.
    """
    shown = printable(text)[:SHOWN]
    if "@" in re.split("[/?#]", _after_scheme(text))[0]:
        raise UrlError("the address holds a user or a password; give the key by itself, not in the address")
    if not re.fullmatch(r"\S+", text) or not text.isprintable():
        raise UrlError(f"{shown!r} is no address; {EXAMPLE}")
    scheme, port = _scheme(text, shown)
    parts = _split(f"{scheme}://{_after_scheme(text)}", shown)
    if parts.fragment:
        raise UrlError(f"{shown!r} holds a #, which no server would see; {EXAMPLE}")
    target = (parts.path if parts.path not in ("", "/") else REALTIME) + (f"?{parts.query}" if parts.query else "")
    if not target.isascii():
        raise UrlError(f"{shown!r}: its path holds other characters than ASCII; percent-encode them")
    address = Address(scheme == "wss", _host(parts, shown), port if parts.port is None else parts.port, target)
    if not _fits_a_header(address.place):
        raise UrlError(f"{shown!r}: its host's name is too long")
    return address


def _after_scheme(text: str) -> str:
    return text.partition("://")[2] if "://" in text else text


def _scheme(text: str, shown: str) -> tuple[str, int]:
    """``ws`` or ``wss``, and the port that goes with what is written."""
    name, found, _ = text.partition("://")
    if not found:
        return "ws", SERVER_PORT
    if name.lower() not in SCHEMES:
        raise UrlError(f"{shown!r}: {printable(name)[:SHOWN]}:// is not spoken here; ws:// and wss:// are")
    return SCHEMES[name.lower()]


def _split(url: str, shown: str) -> SplitResult:
    try:
        parts = urlsplit(url)
        if parts.port == 0:
            raise ValueError("Port out of range 1-65535")
    except ValueError as error:
        what = "its port is no number from 1 to 65535" if "ort" in str(error) else "its host is no name and no address"
        raise UrlError(f"{shown!r}: {what}; {EXAMPLE}") from None
    return parts


def _host(parts: SplitResult, shown: str) -> str:
    """The host in ASCII."""
    host = parts.hostname or ""
    if ":" in host:
        try:
            return str(ipaddress.IPv6Address(host))
        except ValueError:
            raise UrlError(f"{shown!r}: its host is no IPv6 address; {EXAMPLE}") from None
    try:
        host = host if host.isascii() else host.encode("idna").decode("ascii")
    except UnicodeError:
        host = ""
    if not re.fullmatch(r"[a-z0-9_]([a-z0-9._-]*[a-z0-9_.-])?", host) or ".." in host:
        raise UrlError(f"{shown!r}: its host is no name and no address; {EXAMPLE}")
    return host


def _fits_a_header(place: str) -> bool:
    """Whether the WebSocket library can write it: it encodes host and port together, as a name's labels."""
    try:
        return len(place.encode("idna")) <= 260
    except UnicodeError:
        return False
