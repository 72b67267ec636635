"""Reaching a server: TCP, TLS, and what to say of one that opens no WebSocket.

Knows no WebSocket; ``link`` begins where this ends.
"""

import contextlib
import re
import socket
import ssl
from dataclasses import dataclass
from typing import Final

import trio

from voicechat_client.address import Address
from voicechat_client.errors import (
    ClientError,
    ConnectError,
    ConnectTimeoutError,
    ForbiddenError,
    NotVoiceChatError,
    RefusedError,
    ResolveError,
    TlsError,
    UnauthorisedError,
)
from voicechat_core.terminal import printable

__all__ = ["BROKEN", "BYTES_A_READ", "LinkLimits", "cut", "dial", "leaves", "not_upgraded"]

BYTES_A_READ: Final = 65536  # some thirteen frames of speech
BROKEN: Final = (trio.BrokenResourceError, trio.ClosedResourceError, trio.BusyResourceError)
SHOWN: Final = 60  # characters of an answer that is not understood
TLS_RECORDS: Final = (b"\x15\x03", b"\x16\x03")  # an alert, a handshake


@dataclass(frozen=True)
class LinkLimits:
    """Of one connection.

    Attributes:
        connect_seconds: to find the host and reach it.
        handshake_seconds: for TLS and the answer to the upgrade.
        close_seconds: for the last message to be taken, the server's close frame and its hanging up.
        message_chars: of one message. A server's largest are texts of a whole session, some 100 kB.
        message_parts: that a message may come in: frames, and what is read of one at a time.
        waiting_messages: that were read and not received; a burst.
    """

    connect_seconds: float = 10.0
    handshake_seconds: float = 10.0
    close_seconds: float = 2.0
    message_chars: int = 4 * 2**20
    message_parts: int = 2**16
    waiting_messages: int = 8


# ---- reaching it


async def dial(address: Address, tls: ssl.SSLContext | None, limits: LinkLimits) -> trio.abc.Stream:
    """A stream to the server, its TLS agreed on.

    Raises:
        ClientError: ConnectError or TlsError.
    """
    where = _host_and_port(address)
    with trio.move_on_after(limits.connect_seconds) as scope:
        try:
            stream = await trio.open_tcp_stream(address.host, address.port)
        except (OSError, UnicodeError) as error:
            raise _unreached(address, error) from None
    if scope.cancelled_caught:
        raise ConnectTimeoutError(
            f"{where} did not answer within {limits.connect_seconds:g} seconds: is the address right, and no firewall "
            "between?"
        )
    _keep_alive(stream)
    return stream if tls is None else await _with_tls(stream, address, tls, limits.handshake_seconds)


def _host_and_port(address: Address) -> str:
    return f"[{address.host}]:{address.port}" if ":" in address.host else f"{address.host}:{address.port}"


def _unreached(address: Address, error: Exception) -> ConnectError:
    where = _host_and_port(address)
    if isinstance(error, socket.gaierror | UnicodeError):
        return ResolveError(f"there is no host {address.host!r} to be found: is its name right, is there a network?")
    reasons = leaves(error.__cause__) or [error]
    if any(isinstance(reason, ConnectionRefusedError) for reason in reasons):
        return RefusedError(f"nobody listens on {where}: is the server running, and on this port?")
    if any(isinstance(reason, TimeoutError) for reason in reasons):
        return ConnectTimeoutError(f"{where} did not answer: is the address right, and no firewall between?")
    known = [reason.strerror for reason in reasons if isinstance(reason, OSError) and reason.strerror]
    return ConnectError(f"{where} cannot be reached: {known[0] if known else error}")


def leaves(error: BaseException | None) -> list[BaseException]:
    """The errors in a group, or the one error."""
    if isinstance(error, BaseExceptionGroup):
        return [leaf for each in error.exceptions for leaf in leaves(each)]
    return [] if error is None else [error]


def _keep_alive(stream: trio.SocketStream) -> None:
    """Have a server that vanished without a word noticed after three quarters of a minute, while nothing is sent."""
    wanted = {"TCP_KEEPIDLE": 15, "TCP_KEEPALIVE": 15, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3}
    with contextlib.suppress(OSError):
        stream.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in wanted.items():
            if hasattr(socket, name):  # the first is Linux's name of what macOS calls by the second
                stream.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


async def _with_tls(
    stream: trio.SocketStream, address: Address, tls: ssl.SSLContext, seconds: float
) -> trio.abc.Stream:
    secure = trio.SSLStream(stream, tls, server_hostname=address.host, https_compatible=True)
    try:
        with trio.move_on_after(seconds):
            await secure.do_handshake()
            return secure
        raise ConnectTimeoutError(
            f"{address.place} did not answer the TLS handshake within {seconds:g} seconds: does it speak TLS?"
        )
    except trio.BrokenResourceError as error:
        await cut(stream)
        raise TlsError(_tls_fault(address, error.__cause__)) from None
    except BaseException:
        await cut(stream)
        raise


def _tls_fault(address: Address, cause: BaseException | None) -> str:
    if isinstance(cause, ssl.SSLCertVerificationError):
        return (
            f"{address.place} is not trusted: {cause.verify_message.rstrip('.')}. If the certificate is your own, give "
            "the file that it or its issuer is in (--ca-file)"
        )
    reason = getattr(cause, "reason", None)
    if reason in ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "PACKET_LENGTH_TOO_LONG", "HTTP_REQUEST"):
        return f"{address.place} does not speak TLS: connect with ws:// instead of wss://"
    what = str(reason).lower().replace("_", " ") if reason else "it hung up"
    return f"TLS with {address.place} failed: {what}. Does it speak TLS (wss://)?"


# ---- what answered instead


def not_upgraded(address: Address, answer: bytes, waited: float | None) -> ClientError:
    """What to say of a server that did not open a WebSocket.

    Args:
        address: whom we asked.
        answer: all that it said.
        waited: seconds, if it did not come to an end; else None.
    """
    status = re.match(rb"HTTP/\d(?:\.\d)? (\d{3})\b", answer)
    if status is not None:
        return _not_that_status(address, int(status[1]), answer)
    if answer:
        return _not_http(address, answer)
    if waited is not None:
        return ConnectTimeoutError(f"{address.place} said nothing within {waited:g} seconds: is it a voicechat server?")
    other = "ws" if address.tls else "wss"
    return NotVoiceChatError(
        f"{address.place} hung up without an answer: is it a voicechat server, and does it speak {other}:// instead?"
    )


def _not_that_status(address: Address, status: int, answer: bytes) -> ClientError:
    if status == 401:
        return UnauthorisedError(
            f"{address.place} wants a valid API key: give it by a key file or the variable VOICECHAT_API_KEY"
        )
    if status == 403:
        return ForbiddenError(f"{address.place} does not let this client in (403): ask whoever runs it")
    if status == 101:
        return NotVoiceChatError(f"{address.place} opened something else than a WebSocket", status)
    there = re.search(rb"\r\nlocation:[ \t]*([^\r\n]+)", answer, re.IGNORECASE) if 300 <= status < 400 else None
    if there is not None:
        url = printable(there[1].decode("latin-1"))[:200]
        return NotVoiceChatError(f"{address} has moved to {url}: connect there", status)
    if status == 404:
        return NotVoiceChatError(f"there is no {printable(address.target)[:100]} on {address.place} (404)", status)
    if status in (502, 503, 504):
        return NotVoiceChatError(f"{address.place} answers {status}: the server behind it is down; try later", status)
    return NotVoiceChatError(
        f"{address} is no voicechat server's: it answers HTTP {status}, and opens no WebSocket", status
    )


def _not_http(address: Address, answer: bytes) -> ClientError:
    if answer.startswith(TLS_RECORDS):
        return TlsError(f"{address.place} speaks TLS: connect with wss:// instead of ws://")
    shown = printable(answer[:SHOWN].decode("latin-1"), " ")
    return NotVoiceChatError(f"{address.place} is no voicechat server: it says {shown!r}")


async def cut(stream: trio.abc.Stream) -> None:
    """Close a stream at once. Never raises, cannot be cancelled."""
    with trio.CancelScope(shield=True), contextlib.suppress(*BROKEN):
        await trio.aclose_forcefully(stream)
