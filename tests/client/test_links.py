"""Getting to a server, or not: addresses, TCP, TLS, HTTP, and peers that are something else."""

import ssl
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio
import trustme

from tests.client.peers import CREATED, DONE, Raw, error_event, run, scripted
from tests.server.frames import TEXT, frame
from voicechat_client import (
    BusyError,
    ClientError,
    ClientLimits,
    ConnectError,
    ConnectTimeoutError,
    ForbiddenError,
    LoadingError,
    NotVoiceChatError,
    RefusedError,
    ResolveError,
    TlsError,
    UnauthorisedError,
    UnavailableError,
    UrlError,
    connect,
)
from voicechat_client.address import parse
from voicechat_core.errors import InputError, VoiceChatError

SECRET = "s3cret-key"
QUICK = ClientLimits(close_seconds=0.3)
SHORT = ClientLimits(handshake_seconds=0.3, created_seconds=0.3, close_seconds=0.3)


# ---- addresses


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("127.0.0.1:8080", "ws://127.0.0.1:8080/v1/realtime"),
        ("localhost", "ws://localhost:8080/v1/realtime"),
        ("ws://Example.org", "ws://example.org/v1/realtime"),
        ("ws://example.org:80/", "ws://example.org/v1/realtime"),
        ("http://example.org:8080", "ws://example.org:8080/v1/realtime"),
        ("HTTPS://example.org", "wss://example.org/v1/realtime"),
        ("wss://example.org:8443/voice/v1/realtime?model=a", "wss://example.org:8443/voice/v1/realtime?model=a"),
        ("wss://example.org:443", "wss://example.org/v1/realtime"),
        ("[::1]:8080", "ws://[::1]:8080/v1/realtime"),
        ("ws://[FE80::1]", "ws://[fe80::1]/v1/realtime"),
        ("my_host:1", "ws://my_host:1/v1/realtime"),
        ("ws://bücher.example:9", "ws://xn--bcher-kva.example:9/v1/realtime"),
    ],
)
def test_addresses_are_completed(text: str, url: str) -> None:
    assert str(parse(text)) == url


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("", "no address"),
        ("two words", "no address"),
        ("ws://host\r\nX: y", "no address"),
        ("ws://\x1b[2J", "no address"),
        ("ftp://host", "ftp:// is not spoken"),
        ("ws://", "its host"),
        ("ws://:8080", "its host"),
        ("ws://ho$t", "its host"),
        ("ws://a..b", "its host"),
        ("ws://-a", "its host"),
        ("ws://[::g]", "its host"),
        ("ws://[::1", "its host"),
        ("host:0", "its port"),
        ("host:65536", "its port"),
        ("host:http", "its port"),
        ("ws://host/#part", "#"),
        ("ws://host/vöice", "percent-encode"),
        (f"ws://{'a' * 70}", "too long"),
        (f"ws://{'a' * 62}:8080", "too long"),
        ("ws://" + ".".join(["a" * 50] * 6), "too long"),
    ],
)
def test_bad_addresses_are_one_clear_line(text: str, word: str) -> None:
    with pytest.raises(UrlError) as caught:
        parse(text)
    message = str(caught.value)
    assert word in message
    assert message.isprintable()
    assert isinstance(caught.value, InputError)
    assert caught.value.exit_status == 2


def test_a_password_in_an_address_is_refused_and_not_repeated() -> None:
    for text in (f"ws://user:{SECRET}@host", f"user:{SECRET}@host:80/path", f"ws://{SECRET}@host?a=b"):
        with pytest.raises(UrlError) as caught:
            parse(text)
        assert SECRET not in str(caught.value)


# ---- no connection


async def fails(kind: type[ClientError], url: str, **options: Any) -> str:
    """The message of an error of exactly this kind, which is not a group and leaves nothing behind."""
    with pytest.raises(ClientError) as caught:
        async with connect(url, **{"limits": QUICK, **options}):
            raise AssertionError("connected")
    assert type(caught.value) is kind, repr(caught.value)
    assert isinstance(caught.value, VoiceChatError)
    assert str(caught.value).isprintable()
    return str(caught.value)


def test_a_port_where_nobody_listens() -> None:
    async def main() -> None:
        with trio.socket.socket() as taken:
            await taken.bind(("127.0.0.1", 0))
            port = taken.getsockname()[1]
            assert f"localhost:{port}" in await fails(RefusedError, f"localhost:{port}")
            assert f"127.0.0.1:{port}" in await fails(RefusedError, f"ws://127.0.0.1:{port}")

    run(main)


def _getaddrinfo(error: Exception) -> Callable[..., Any]:
    async def getaddrinfo(*args: Any, **options: Any) -> Any:
        await trio.lowlevel.checkpoint()
        raise error

    return getaddrinfo


def test_a_host_that_does_not_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    import socket

    async def main() -> None:
        error = socket.gaierror(-2, "Name or service not known")
        monkeypatch.setattr("trio._highlevel_open_tcp_stream.getaddrinfo", _getaddrinfo(error))
        assert "'nowhere.invalid'" in await fails(ResolveError, "ws://nowhere.invalid")

    run(main)


def test_a_host_that_cannot_be_reached_or_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    async def failing(error: OSError, *args: Any) -> trio.SocketStream:
        await trio.lowlevel.checkpoint()
        raise OSError("all attempts failed") from ExceptionGroup("", [error])

    async def silent(*args: Any) -> trio.SocketStream:
        await trio.sleep_forever()
        raise AssertionError

    async def main() -> None:
        monkeypatch.setattr("trio.open_tcp_stream", partial(failing, OSError(113, "No route to host")))
        assert "No route to host" in await fails(ConnectError, "192.0.2.1:80")
        monkeypatch.setattr("trio.open_tcp_stream", partial(failing, TimeoutError(110, "Connection timed out")))
        assert "did not answer" in await fails(ConnectTimeoutError, "192.0.2.1:80")
        monkeypatch.setattr("trio.open_tcp_stream", silent)
        message = await fails(ConnectTimeoutError, "192.0.2.1:80", limits=ClientLimits(connect_seconds=0.05))
        assert "192.0.2.1:80 did not answer within 0.05 seconds" in message

    run(main)


async def greets(raw: Raw) -> None:
    await raw.accept()
    await raw.say(CREATED, DONE)
    await raw.close()


class BothFamilies(trio.abc.HostnameResolver):
    """Resolves every name to both loopback addresses."""

    async def getaddrinfo(self, host: Any, port: Any, *args: Any, **options: Any) -> Any:
        await trio.lowlevel.checkpoint()
        kind, stream = trio.socket.SOCK_STREAM, trio.socket.IPPROTO_TCP
        return [
            (trio.socket.AF_INET6, kind, stream, "", ("::1", port, 0, 0)),
            (trio.socket.AF_INET, kind, stream, "", ("127.0.0.1", port)),
        ]

    async def getnameinfo(self, sockaddr: Any, flags: int) -> tuple[str, str]:
        raise NotImplementedError


def test_localhost_is_found_by_both_families() -> None:
    """Where only IPv4 listens, and where only IPv6 does, on a machine where the name means both."""

    async def converse(stream: trio.abc.Stream) -> None:
        async with stream:
            await greets(Raw(stream))

    async def main() -> None:
        trio.socket.set_custom_hostname_resolver(BothFamilies())
        for host in ("127.0.0.1", "::1"):
            listeners = await trio.open_tcp_listeners(0, host=host)
            port = listeners[0].socket.getsockname()[1]
            async with trio.open_nursery() as nursery:
                nursery.start_soon(trio.serve_listeners, converse, listeners)
                async with connect(f"localhost:{port}") as conversation:
                    assert [type(event).__name__ async for event in conversation] == ["ResponseDone"]
                nursery.cancel_scope.cancel()

    run(main)


# ---- TLS


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


def server_side(authority: trustme.CA, name: str) -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert(name).configure_cert(context)
    return context


@pytest.fixture
def ca_file(authority: trustme.CA, tmp_path: Path) -> Path:
    path = tmp_path / "ca.pem"
    authority.cert_pem.write_to_path(str(path))
    return path


def test_tls_with_an_authority_of_ones_own(authority: trustme.CA, ca_file: Path) -> None:
    async def main() -> None:
        async with scripted(greets, tls=server_side(authority, "127.0.0.1")) as place:
            async with connect(f"wss://{place}", ca_file=ca_file) as conversation:
                assert [type(event).__name__ async for event in conversation] == ["ResponseDone"]
            message = await fails(TlsError, f"wss://{place}")
            assert "is not trusted" in message
            assert "--ca-file" in message

    run(main)


def test_tls_for_another_name(authority: trustme.CA, ca_file: Path) -> None:
    async def main() -> None:
        async with scripted(greets, tls=server_side(authority, "example.org")) as place:
            message = await fails(TlsError, f"https://{place}", ca_file=ca_file)
            assert "not valid for '127.0.0.1'. If" in message

    run(main)


def test_tls_on_one_side_only(authority: trustme.CA) -> None:
    async def main() -> None:
        async with scripted(greets, tls=server_side(authority, "127.0.0.1")) as place:
            # Ours says no word when it hears no TLS; for one that says an alert see test_other_answers.
            assert "does it speak wss:// instead" in await fails(NotVoiceChatError, f"ws://{place}")

        async def plain(raw: Raw) -> None:
            await raw.stream.receive_some(10)
            await raw.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        async with scripted(plain) as place:
            assert "ws:// instead of wss://" in await fails(TlsError, f"wss://{place}")

        async def silent(raw: Raw) -> None:
            await trio.sleep_forever()

        async with scripted(silent) as place:
            assert "TLS handshake within 0.3 seconds" in await fails(
                ConnectTimeoutError, f"wss://{place}", limits=SHORT
            )

        async def hangs_up(raw: Raw) -> None:
            await raw.stream.receive_some(10)
            raw.reset()

        async with scripted(hangs_up) as place:
            assert "hung up" in await fails(TlsError, f"wss://{place}")

    run(main)


def test_files_of_certificates_that_are_none(tmp_path: Path) -> None:
    async def main() -> None:
        assert "cannot be read" in await fails(UrlError, "wss://h", ca_file=tmp_path / "none")
        (tmp_path / "text").write_text("no certificate")
        assert "holds none" in await fails(UrlError, "wss://h", ca_file=str(tmp_path / "text"))
        for path in (tmp_path / "none", tmp_path / "text"):
            message = await fails(UrlError, "ws://127.0.0.1:1", ca_file=path)
            assert message.startswith(f"ws://127.0.0.1:1/v1/realtime speaks no TLS, so the certificates in {path}")

    run(main)


# ---- who may come in


def test_what_is_no_key_is_not_shown() -> None:
    async def main() -> None:
        with pytest.raises(InputError) as caught:
            async with connect("h", key="two words"):
                pass
        assert "two words" not in str(caught.value)

    run(main)


def answers(data: bytes) -> Callable[[Raw], Any]:
    async def script(raw: Raw) -> None:
        await raw.head()
        await raw.write(data)

    return script


def http(status: str, *lines: str, body: str = "") -> bytes:
    return "\r\n".join([f"HTTP/1.1 {status}", *lines, "", body]).encode()


@pytest.mark.parametrize(
    ("answer", "kind", "word"),
    [
        (http("401 Unauthorized", "Content-Length: 0"), UnauthorisedError, "API key"),
        (http("403 Forbidden", "Content-Length: 3", body="no!"), ForbiddenError, "403"),
        (http("404 Not Found", "Content-Length: 0"), NotVoiceChatError, "no /v1/realtime"),
        (http("404 Not Found", body="until it hangs up"), NotVoiceChatError, "no /v1/realtime"),
        (http("200 OK", "Content-Length: 2", body="hi"), NotVoiceChatError, "HTTP 200"),
        (http("502 Bad Gateway", "Transfer-Encoding: chunked", body="0\r\n\r\n"), NotVoiceChatError, "try later"),
        (http("301 Moved", "Location: wss://there\x07", "Content-Length: 0"), NotVoiceChatError, "wss://there�"),
        (http("302 Found", "Content-Length: 0"), NotVoiceChatError, "HTTP 302"),
        (http("101 Switching", "Upgrade: websocket", "Connection: Upgrade"), NotVoiceChatError, "something else"),
        (
            http("101 Switching", "Upgrade: websocket", "Connection: Upgrade", "Sec-WebSocket-Accept: AAAA"),
            NotVoiceChatError,
            "something else",
        ),
        (b"SSH-2.0-OpenSSH_9.2\r\n", NotVoiceChatError, "SSH-2.0-OpenSSH"),
        (b"\xff\x00\x1b[2J" * 40, NotVoiceChatError, "it says"),
        (b"HTTP/1.1 200 OK\r\nX: " + b"a" * 10**6, NotVoiceChatError, "HTTP 200"),
        (http("200 OK", "Content-Length: 10000000", body="a" * 10**6), NotVoiceChatError, "HTTP 200"),
        (b"", NotVoiceChatError, "hung up"),
        (b"\x15\x03\x01\x00\x02\x02\x16", TlsError, "wss://"),
    ],
)
def test_other_answers(answer: bytes, kind: type[ClientError], word: str) -> None:
    async def main() -> None:
        async with scripted(answers(answer)) as place:
            assert word in await fails(kind, place)

    run(main)


def test_an_http_status_is_told() -> None:
    async def main() -> None:
        async with scripted(answers(http("404 Not Found", "Content-Length: 0"))) as place:
            with pytest.raises(NotVoiceChatError) as caught:
                async with connect(place):
                    pass
            assert caught.value.status == 404

    run(main)


def test_an_answer_that_never_ends_or_never_begins() -> None:
    async def trickle(raw: Raw, first: bytes) -> None:
        await raw.head()
        await raw.write(first)
        while True:
            await raw.write(b"a")
            await trio.sleep(0.02)

    async def silent(raw: Raw) -> None:
        await trio.sleep_forever()

    async def main() -> None:
        async with scripted(partial(trickle, first=http("503 Busy", "Content-Length: 1000"))) as place:
            assert "503" in await fails(NotVoiceChatError, place, limits=SHORT)
        async with scripted(silent) as place:
            assert "said nothing within 0.3 seconds" in await fails(ConnectTimeoutError, place, limits=SHORT)

    run(main)


def test_an_answer_without_end_is_not_listened_to() -> None:
    async def script(raw: Raw) -> None:
        await raw.head()
        await raw.write(http("200 OK", "Content-Length: 10000000000"))
        while True:
            await raw.stream.send_all(b"a" * 65536)
            await trio.sleep(0.001)

    async def main() -> None:
        async with scripted(script) as place:
            began = trio.current_time()
            assert "HTTP 200" in await fails(NotVoiceChatError, place, limits=ClientLimits(handshake_seconds=15))
            assert trio.current_time() - began < 10

    run(main)


def test_a_reset_instead_of_an_answer() -> None:
    async def script(raw: Raw) -> None:
        await raw.head()
        raw.reset()

    async def main() -> None:
        async with scripted(script) as place:
            assert "hung up without an answer" in await fails(NotVoiceChatError, place)

    run(main)


# ---- WebSockets of another kind


def opens_with(*messages: Any, code: int | None = None) -> Callable[[Raw], Any]:
    async def script(raw: Raw) -> None:
        await raw.accept()
        await raw.say(*messages)
        if code is not None:
            await raw.close(code, "because")
        await trio.sleep_forever()

    return script


OPENAI = {"type": "session.created", "event_id": "e", "session": {"id": "s", "type": "realtime"}}
OTHER_RATE = CREATED | {
    "session": CREATED["session"] | {"output_audio_format": {"type": "pcm16", "sample_rate": 24000}}
}


@pytest.mark.parametrize(
    ("script", "word"),
    [
        (opens_with("hello"), "cannot be read"),
        (opens_with({"type": "welcome"}), "unsupported event type"),
        (opens_with({"type": "session.created", "event_id": "e"}), "session.created"),
        (opens_with(DONE), "response.done; session.created is needed"),
        (opens_with(OPENAI), "input_audio_format"),
        (opens_with(OTHER_RATE), "24000 Hz"),
        (opens_with(error_event("what", "go\naway")), "go away (what)"),
        (opens_with(code=1011), "closed with 1011 because"),
        (opens_with(code=1000), "closed with 1000 because"),
    ],
)
def test_websockets_that_do_not_speak_this_protocol(script: Callable[[Raw], Any], word: str) -> None:
    async def main() -> None:
        async with scripted(script) as place:
            message = await fails(NotVoiceChatError, place)
            assert word in message
            assert place in message

    run(main)


def test_a_websocket_whose_frames_are_none() -> None:
    async def script(raw: Raw) -> None:
        await raw.accept()
        await raw.write(frame(5, b"x", masked=False))
        await trio.sleep_forever()

    async def main() -> None:
        async with scripted(script) as place:
            message = await fails(NotVoiceChatError, place)
            assert "does not keep to the WebSocket protocol: Invalid opcode 0x5" in message

    run(main)


def test_a_websocket_that_says_nothing() -> None:
    async def main() -> None:
        async with scripted(opens_with()) as place:
            message = await fails(NotVoiceChatError, place, limits=SHORT)
            assert "no session.created came within 0.3 seconds" in message

    run(main)


def test_what_comes_with_the_handshake_is_not_lost() -> None:
    import json

    async def script(raw: Raw) -> None:
        await raw.accept(behind=b"".join(frame(TEXT, json.dumps(each), masked=False) for each in (CREATED, DONE)))
        await raw.close()

    async def main() -> None:
        async with scripted(script) as place, connect(place) as conversation:
            assert [type(event).__name__ async for event in conversation] == ["ResponseDone"]

    run(main)


# ---- try again later


def refuses(code: str) -> Callable[[Raw], Any]:
    async def script(raw: Raw) -> None:
        await raw.accept()
        await raw.say(error_event(code, "not now"))
        await raw.close(1013, "busy")

    return script


def test_busy_and_loading() -> None:
    async def main() -> None:
        async with scripted(refuses("server_busy")) as place:
            assert "not now (server_busy)" in await fails(BusyError, place)
        async with scripted(refuses("model_loading")) as place:
            assert "not now (model_loading)" in await fails(LoadingError, place)


async def closes_at_once(raw: Raw) -> None:
    await raw.accept()
    await raw.close(1013, "full")


def test_a_close_that_says_try_again_later() -> None:
    """Without any message: of a server of another make, or of something between."""

    async def main() -> None:
        async with scripted(closes_at_once) as place:
            assert "no room now: it closed with 1013 full" in await fails(BusyError, place)
        async with (
            scripted(closes_at_once, greets) as place,
            connect(place, retry_busy_seconds=5) as conversation,
        ):
            assert [type(event).__name__ async for event in conversation] == ["ResponseDone"]

    run(main)


def test_trying_again_until_there_is_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("voicechat_client.client.FIRST_RETRY", 0.05)
    told: list[tuple[UnavailableError, float]] = []

    async def main() -> None:
        scripts = [refuses("model_loading"), refuses("server_busy"), refuses("server_busy"), greets]
        async with (
            scripted(*scripts) as place,
            connect(place, retry_busy_seconds=10, waiting=lambda *news: told.append(news)) as conversation,
        ):
            assert [type(event).__name__ async for event in conversation] == ["ResponseDone"]

    run(main)
    assert [type(error) for error, _ in told] == [LoadingError, BusyError, BusyError]
    waits = [seconds for _, seconds in told]
    assert all(0.8 * base <= seconds <= 1.2 * base for base, seconds in zip((0.05, 0.1, 0.2), waits, strict=True))


def test_trying_again_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a last try at its end, and the last error."""
    monkeypatch.setattr("voicechat_client.client.FIRST_RETRY", 0.05)
    told: list[float] = []

    async def main() -> None:
        async with scripted(refuses("server_busy")) as place:
            began = trio.current_time()
            await fails(BusyError, place, retry_busy_seconds=0.3, waiting=lambda error, seconds: told.append(seconds))
            assert 0.3 <= trio.current_time() - began < 2
        assert sum(told) <= 0.3

    run(main)


def test_other_errors_are_not_tried_again() -> None:
    async def main() -> None:
        began = trio.current_time()
        async with scripted(answers(http("401 No", "Content-Length: 0"))) as place:
            await fails(UnauthorisedError, place, retry_busy_seconds=60)
        assert trio.current_time() - began < 5

    run(main)
