"""Keys, origins, and where a server may listen."""

import logging
from pathlib import Path

import pytest

from voicechat_core.errors import InputError
from voicechat_server.auth import (
    Gate,
    Key,
    Refusal,
    offered_subprotocols,
    read_key,
    require_safe_listening,
)

SECRET = "s3cret-key"
NO_KEY = Refusal(401, "a valid API key is needed for /v1/realtime")
NO_ORIGIN = Refusal(403, "origin not allowed for /v1/realtime")


def lines(**headers: str) -> list[tuple[bytes, bytes]]:
    return [(name.replace("_", "-").encode(), value.encode("latin-1")) for name, value in headers.items()]


# ---- the key


@pytest.mark.parametrize("text", ["", "two words", "tab\tbed", "schlüssel", "new\nline", "del\x7f"])
def test_what_is_no_key_is_refused_and_not_repeated(text: str) -> None:
    with pytest.raises(InputError) as caught:
        Key(text)
    assert not text or text not in str(caught.value)


def test_a_key_is_not_shown() -> None:
    key = Key(SECRET)
    assert SECRET not in f"{key} {key!r} {[key]} {Gate(key)!r}"
    assert repr(key) == "Key(hidden)"


def test_a_key_matches_itself_alone() -> None:
    key = Key(SECRET)
    assert key.matches(SECRET.encode())
    others = [b"", b"s3cret-ke", b"s3cret-key ", b"S3CRET-KEY", b"s3cret-kez", SECRET.encode() * 2, b"\xff\xfe"]
    assert not any(key.matches(other) for other in others)


def test_a_key_is_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[object, object]] = []

    def compare(a: object, b: object) -> bool:
        asked.append((a, b))
        return False

    monkeypatch.setattr("voicechat_core.keys.hmac.compare_digest", compare)
    assert Gate(Key("abc")).refusal(lines(authorization="Bearer abc")) == NO_KEY
    assert asked == [(b"abc", b"abc")]


def test_the_file_goes_before_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("from-file\n")
    environment = {"VOICECHAT_API_KEY": "from-env "}
    both, one, none = read_key(file, environment), read_key(None, environment), read_key(None, {})
    assert both is not None
    assert both.matches(b"from-file")
    assert one is not None
    assert one.matches(b"from-env")
    assert none is None
    assert read_key(None, {"VOICECHAT_API_KEY": "  "}) is None


@pytest.mark.parametrize("content", [b"", b"\n", b"two words", b"\xff\xfe"])
def test_a_file_without_a_key_is_an_error_that_does_not_show_it(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "key"
    file.write_bytes(content)
    with pytest.raises(InputError, match=r"the API key file .*key") as caught:
        read_key(file, {"VOICECHAT_API_KEY": "other"})
    assert "two words" not in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="nowhere cannot be read: No such file or directory"):
        read_key(tmp_path / "nowhere", {})


@pytest.mark.parametrize("header", ["Bearer s3cret-key", "bearer s3cret-key", "Bearer   s3cret-key "])
def test_the_bearer_header_lets_in(header: str) -> None:
    assert Gate(Key(SECRET)).refusal(lines(authorization=header)) is None


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": ""},
        {"authorization": "Bearer"},
        {"authorization": "Bearer wrong"},
        {"authorization": "Basic s3cret-key"},
        {"authorization": "s3cret-key"},
        {"x-api-key": "s3cret-key"},
        {"sec-websocket-protocol": "realtime"},
        {"sec-websocket-protocol": "realtime, openai-insecure-api-key.wrong"},
        {"sec-websocket-protocol": "openai-insecure-api-key.s3cret-key"},  # not beside realtime
        {"sec-websocket-protocol": "realtime, s3cret-key"},
    ],
)
def test_anything_else_does_not(headers: dict[str, str]) -> None:
    assert Gate(Key(SECRET)).refusal(lines(**headers)) == NO_KEY


def test_a_browsers_subprotocols_let_in() -> None:
    one = lines(sec_websocket_protocol="realtime, openai-insecure-api-key.s3cret-key,openai-beta.realtime-v1")
    two = [
        (b"sec-websocket-protocol", b"realtime"),
        (b"sec-websocket-protocol", b"openai-insecure-api-key.s3cret-key"),
    ]
    assert Gate(Key(SECRET)).refusal(one) is None
    assert Gate(Key(SECRET)).refusal(two) is None
    assert offered_subprotocols(two) == [b"realtime", b"openai-insecure-api-key.s3cret-key"]
    assert offered_subprotocols(lines(sec_websocket_protocol=" ,, realtime")) == [b"realtime"]


def test_the_key_goes_before_the_origin() -> None:
    gate = Gate(Key(SECRET))
    evil = lines(origin="https://evil.example", host="here")
    assert gate.refusal(evil) == NO_KEY
    assert gate.refusal([*evil, *lines(authorization=f"Bearer {SECRET}")]) == NO_ORIGIN


def test_nothing_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    Gate(Key(SECRET)).refusal(lines(authorization="Bearer wrong"))
    Gate(Key(SECRET)).refusal(lines(authorization=f"Bearer {SECRET}"))
    assert caplog.text == ""


# ---- origins


@pytest.mark.parametrize(
    ("origin", "host", "allowed"),
    [
        (None, "anything", True),
        ("http://localhost", "10.0.0.5:8080", True),
        ("http://localhost:3000", "10.0.0.5:8080", True),
        ("HTTPS://LocalHost:3000", "10.0.0.5:8080", True),
        ("http://127.0.0.1:5173", "x", True),
        ("http://[::1]:5173", "x", True),
        ("http://10.0.0.5:8080", "10.0.0.5:8080", True),
        ("http://10.0.0.5", "10.0.0.5:80", True),
        ("http://10.0.0.5:80", "10.0.0.5", True),
        ("https://10.0.0.5", "10.0.0.5", True),
        ("http://[fe80::1]:8080", "[fe80::1]:8080", True),
        ("https://10.0.0.5", "10.0.0.5:80", False),
        ("http://10.0.0.5:8081", "10.0.0.5:8080", False),
        ("http://10.0.0.6:8080", "10.0.0.5:8080", False),
        ("https://listed.example", "x", True),
        ("https://listed.example:443", "x", True),
        ("http://listed.example", "x", False),
        ("https://listed.example:8443", "x", False),
        ("https://sub.listed.example", "x", False),
        ("https://listed.example.evil.example", "x", False),
        ("http://localhost.evil.example", "x", False),
        ("http://127.0.0.1.evil.example", "x", False),
        ("http://evil.example/localhost", "x", False),
        ("http://localhost@evil.example", "x", False),
        ("null", "null", False),
        ("", "", False),
        ("file://", "x", False),
        ("http://", "", False),
        ("http://10.0.0.5:99999", "10.0.0.5:99999", False),
        ("http://[::1", "x", False),
        ("http://\xff", "\xff", False),
    ],
)
def test_origins_without_a_key(origin: str | None, host: str, allowed: bool) -> None:
    gate = Gate(None, origins=["https://listed.example"])
    headers = lines(host=host) + ([] if origin is None else lines(origin=origin))
    assert gate.refusal(headers) == (None if allowed else NO_ORIGIN)


def test_a_name_is_the_same_host_only_where_a_key_is_needed_too() -> None:
    """Without one, a page of evil.example that lets its name lead to 127.0.0.1 could use the server."""
    page = lines(origin="http://voice.example:8080", host="voice.example:8080")
    assert Gate(None).refusal(page) == NO_ORIGIN
    assert Gate(Key(SECRET)).refusal([*page, *lines(authorization=f"Bearer {SECRET}")]) is None
    assert Gate(None, origins=["http://voice.example:8080"]).refusal(page) is None


def test_two_origins_or_hosts_are_none() -> None:
    twice = [(b"origin", b"http://localhost"), (b"origin", b"http://localhost")]
    assert Gate(None).refusal(twice) == NO_ORIGIN
    hosts = [(b"origin", b"http://10.0.0.5"), (b"host", b"10.0.0.5"), (b"host", b"10.0.0.5")]
    assert Gate(None).refusal(hosts) == NO_ORIGIN


@pytest.mark.parametrize("text", ["*", "listed.example", "https://", "https://a/b", "ftp://a", "https://a b", "null"])
def test_what_is_no_origin_cannot_be_allowed(text: str) -> None:
    with pytest.raises(InputError, match="is no origin; one looks like"):
        Gate(None, origins=[text])


# ---- listening


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "127.8.9.1", "::1", "[::1]", "localhost", "LOCALHOST", "::ffff:127.0.0.1"]
)
def test_loopback_needs_no_key(host: str) -> None:
    require_safe_listening(host, None, insecure=False)


@pytest.mark.parametrize("host", ["", "0.0.0.0", "::", "10.0.0.5", "fe80::1%eth0", "example.org", "localhost.example"])
def test_elsewhere_needs_a_key_or_insecure(host: str) -> None:
    with pytest.raises(InputError, match="without an API key lets anybody in; give a key, or --insecure"):
        require_safe_listening(host, None, insecure=False)
    require_safe_listening(host, Key(SECRET), insecure=False)
    require_safe_listening(host, None, insecure=True)
