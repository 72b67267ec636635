"""Real processes: TLS, signals, and what becomes of a server whose model cannot be had."""

import json
import signal
import socket
import ssl
import time
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import urlopen

import pytest
import trio
import trustme
from trio_websocket import ConnectionClosed

from tests.server.processes import connected, server
from voicechat_core.errors import InputError
from voicechat_server.running import tls_context

NET = 60.0


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture(scope="module")
def pem(authority: trustme.CA, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A certificate and its key, in one file."""
    path = tmp_path_factory.mktemp("tls") / "server.pem"
    authority.issue_cert("localhost", "127.0.0.1").private_key_and_cert_chain_pem.write_to_path(str(path))
    return path


def test_a_conversation_and_http_over_tls(tiny_path: Path, authority: trustme.CA, pem: Path) -> None:
    trusting = ssl.create_default_context()
    authority.configure_trust(trusting)

    async def converse(url: str) -> list[str]:
        kinds = []
        with trio.fail_after(NET):
            async with connected(url, trusting) as peer:
                kinds.append(json.loads(await peer.get_message())["type"])
                for message in ("session.update", "input_audio_buffer.commit"):
                    await peer.send_message(json.dumps({"type": message}))
                with suppress(ConnectionClosed):
                    while True:
                        kinds.append(json.loads(await peer.get_message())["type"])
                assert peer.closed is not None
                assert peer.closed.code == 1000
        return kinds

    async def plain_bytes(port: int) -> bytes:
        """What somebody gets who does not speak TLS."""
        with trio.fail_after(NET):
            async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
                await stream.send_all(b"GET / HTTP/1.1\r\nHost: here\r\n\r\n")
                return bytes(await stream.receive_some())

    with server("-m", str(tiny_path), "--port", "0", "--tls-cert", str(pem)) as process:
        url = process.ready()
        assert url.startswith("wss://127.0.0.1:")
        for _ in range(2):
            assert trio.run(converse, url) == [
                "session.created", "session.updated", "input_audio_buffer.committed", "response.done",
            ]  # fmt: skip
            assert not trio.run(plain_bytes, urlsplit(url).port).startswith(b"HTTP/")
        with urlopen(url.replace("wss://", "https://").replace("/v1/realtime", "/ready"), context=trusting) as answer:
            assert json.load(answer) == {"ready": True}
        assert process.stop() == 0
        assert "Traceback" not in "".join(process.log)


def test_certificates_that_cannot_be_used(authority: trustme.CA, pem: Path, tmp_path: Path) -> None:
    from cryptography.hazmat.primitives.serialization import (
        BestAvailableEncryption,
        Encoding,
        PrivateFormat,
        load_pem_private_key,
    )

    nothing, other, locked = tmp_path / "none.pem", tmp_path / "other.pem", tmp_path / "locked.pem"
    nothing.write_text("hello")
    authority.issue_cert("elsewhere").private_key_pem.write_to_path(str(other))
    key = load_pem_private_key(other.read_bytes(), None)
    locked.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"secret")))
    with pytest.raises(InputError, match=r"none\.pem cannot be used"):
        tls_context(nothing, None)
    with pytest.raises(InputError, match=r"missing\.pem cannot be read: No such file"):
        tls_context(tmp_path / "missing.pem", None)
    with pytest.raises(InputError, match=r"other\.pem cannot be used: key values mismatch"):
        tls_context(pem, other)
    with pytest.raises(InputError, match="encrypted; a key without a password"):
        tls_context(pem, locked)
    with pytest.raises(InputError, match=r"a TLS key was given \(.*other\.pem\) and no certificate"):
        tls_context(None, other)
    assert tls_context(None, None) is None
    assert tls_context(pem, None) is not None


async def hold(url: str) -> trio.SocketStream:
    """An open conversation whose other end neither reads nor closes."""
    place = urlsplit(url)
    assert place.hostname is not None
    assert place.port is not None
    stream = await trio.open_tcp_stream(place.hostname, place.port)
    request = [f"GET {place.path} HTTP/1.1", f"Host: {place.netloc}", "Upgrade: websocket", "Connection: Upgrade"]
    request += ["Sec-WebSocket-Version: 13", "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA=="]
    await stream.send_all("\r\n".join([*request, "", ""]).encode())
    assert (await stream.receive_some()).startswith(b"HTTP/1.1 101")
    return stream


def test_one_signal_waits_for_the_peers_and_a_second_one_does_not(tiny_path: Path) -> None:
    async def main(url: str) -> None:
        with trio.fail_after(NET):
            async with await hold(url):
                process.process.send_signal(signal.SIGTERM)
                process.read_until("SIGTERM: shutting down")
                process.process.send_signal(signal.SIGTERM)  # a group of processes gets each of them twice
                await trio.sleep(0.7)
                assert process.process.poll() is None  # it waits two seconds for the peer's close frame
                process.process.send_signal(signal.SIGINT)
                assert await trio.to_thread.run_sync(process.end) == 128 + signal.SIGINT

    with server("-m", str(tiny_path), "--port", "0") as process:
        trio.run(main, process.ready())
        assert "SIGINT again: leaving at once" in process.log[-1]


def test_a_signal_is_heard_as_soon_as_it_listens(tiny_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with server("-m", str(tiny_path), "--port", str(port)) as process:
        deadline = time.monotonic() + NET
        while time.monotonic() < deadline:
            with suppress(ConnectionRefusedError), socket.create_connection(("127.0.0.1", port)):
                break
            time.sleep(0.002)
        assert process.stop() == 0


def test_who_says_nothing_does_not_hold_the_end_up(tiny_path: Path) -> None:
    """Half a request; a peer of a conversation has seconds to take its last messages."""
    with server("-m", str(tiny_path), "--port", "0") as process:
        place = urlsplit(process.ready())
        with socket.create_connection((place.hostname, place.port)) as idle:
            idle.sendall(b"GET / HT")
            time.sleep(0.2)
            process.process.send_signal(signal.SIGTERM)
            idle.settimeout(NET)
            assert idle.recv(100) == b""  # at once: it would have had ten seconds
            idle.close()
            assert process.end() == 0


def test_options_before_replay_are_not_passed_over(tmp_path: Path) -> None:
    with server("-m", "x", "replay", str(tmp_path)) as process:
        assert process.end() == 2
        assert process.log == ["voicechat-server: --model stands before replay, whose options come after it\n"]


@pytest.mark.parametrize("host", ["a..b", "no.such.host.invalid"])
def test_a_host_that_is_none(tiny_path: Path, host: str) -> None:
    with server("-m", str(tiny_path), "--host", host, "--insecure") as process:
        assert process.end() == 1
        [line] = "".join(process.log).splitlines()
        assert line.startswith(f"voicechat-server: cannot listen on {host}, port 8080: ")


def test_the_peers_are_told_of_the_shutdown(tiny_path: Path) -> None:
    async def main(url: str) -> None:
        with trio.fail_after(NET):
            async with await hold(url) as stream:
                process.process.send_signal(signal.SIGINT)
                heard = b""
                while data := await stream.receive_some():
                    heard += data
                assert b"\x03\xe9the server is shutting down" in heard  # 1001
                assert await trio.to_thread.run_sync(process.end) == 0

    with server("-m", str(tiny_path), "--port", "0") as process:
        trio.run(main, process.ready())


def test_a_checkpoint_that_cannot_be_loaded_is_one_line(tiny_path: Path, tmp_path: Path) -> None:
    for file in tiny_path.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes()[: 10**5 if file.suffix == ".safetensors" else None])
    with server("-m", str(tmp_path), "--port", "0") as process:
        assert process.end() == 1
        [line] = "".join(process.log).splitlines()
        assert line.startswith(f"voicechat-server: {tmp_path / 'model.safetensors'}: ")


# A model that is well until it is asked for a session, and then takes the thread with it; and one that never loads.
BROKEN = """
import sys
from voicechat_core import VoiceChat
def session(self, **options):
    if "seed" in options:
        raise SystemExit("gone")
    return whole(self, **options)
whole, VoiceChat.session = VoiceChat.session, session
from voicechat_server.cli import main
main()
"""
ENDLESS = """
import time
from voicechat_core import voicechat
voicechat.load = lambda *arguments, **options: print("loading", file=__import__("sys").stderr) or time.sleep(1000)
from voicechat_server import worker
worker.STOP_SECONDS = 0.5
worker.Worker.stop.__defaults__ = (0.5,)
from voicechat_server.cli import main
main()
"""


def test_a_server_whose_model_is_gone_ends(tiny_path: Path) -> None:
    async def main(url: str) -> None:
        with trio.fail_after(NET):
            async with connected(url) as peer:
                await peer.send_message(json.dumps({"type": "session.update"}))
                with suppress(ConnectionClosed):
                    while True:
                        assert "gone" not in await peer.get_message()
                assert peer.closed is not None

    with server("-m", str(tiny_path), "--port", "0", run=BROKEN) as process:
        trio.run(main, process.ready())
        assert process.end() == 1
        assert "".join(process.log).splitlines()[-1] == (
            "voicechat-server: the model's thread has ended: SystemExit"
        )  # fmt: skip


def test_a_model_that_never_loads_holds_nothing_up(tiny_path: Path) -> None:
    with server("-m", str(tiny_path), "--port", "0", run=ENDLESS) as process:
        process.read_until("loading")
        assert process.stop() == 0
        assert "the model's thread does not end; leaving without it" in process.log[-1]
