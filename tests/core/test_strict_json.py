"""JSON from a stranger: one object, or one short error of our own words."""

import json
import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from voicechat_core.errors import WireError
from voicechat_core.strict_json import parse_object, shown

REFUSED = {
    "[]": "the message is an array; a JSON object is needed",
    "5": "the message is 5; a JSON object is needed",
    "null": "the message is null; a JSON object is needed",
    "true": "the message is true; a JSON object is needed",
    '"abc"': "the message is 'abc'; a JSON object is needed",
    "": "the message is not JSON: character 0 cannot stand there",
    '{"a":1': "the message is not JSON: character 6 cannot stand there",
    '{"a":1}{}': "the message is not JSON: character 7 cannot stand there",
    "{'a':1}": "the message is not JSON: character 1 cannot stand there",
    '{"a":"\n"}': "the message is not JSON: character 6 cannot stand there",
    "\ufeff{}": "the message is not JSON: character 0 cannot stand there",
    '{"a":NaN}': "the message holds NaN, which is not JSON",
    '{"a":[-Infinity]}': "the message holds -Infinity, which is not JSON",
    '{"a":1e400}': "the message holds a number out of range: 1e400",
    '{"a":-1e400}': "the message holds a number out of range: -1e400",
    '{"a":1,"b":2,"a":1}': "the message has the key 'a' twice in one object",
    '{"b":{"a":1,"\\u0061":1}}': "the message has the key 'a' twice in one object",
    '{"a":"\\ud800"}': "the message holds the lone surrogate '\\ud800'",
    '{"a":["\\udc00\\ud800"]}': "the message holds the lone surrogate '\\udc00'",
    '{"\\ud8ff":1}': "the message holds the lone surrogate '\\ud8ff'",
    '{"a":"\ud800"}': "the message holds the lone surrogate '\\ud800'",
    '{"a":' + "9" * 41 + "}": "the message holds a number of 41 characters; 40 at most are read",
    '{"a":' + "9" * 5000 + "}": "the message holds a number of 5000 characters; 40 at most are read",
    '{"a":' + "9" * 400 + ".5}": "the message holds a number out of range: " + "9" * 40,
    "[" * 100_000: "the message is nested too deeply",
    '{"a":' * 100_000: "the message is nested too deeply",
    '{"a":' + "[" * 100_000 + "]" * 100_000 + "}": "the message is nested too deeply",
}


@pytest.mark.parametrize(("text", "message"), REFUSED.items(), ids=lambda text: text[:20].encode("utf-8", "replace"))
def test_refused(text: str, message: str) -> None:
    with pytest.raises(WireError) as found:
        parse_object(text)
    assert str(found.value) == message
    assert (found.value.code, found.value.event_type) == ("invalid_request", None)


@pytest.mark.parametrize(("data", "place"), [(b"\xff{}", 0), (b'{"a":"\xc3"}', 6), ("{}".encode("utf-16"), 0)])
def test_bytes_are_utf8(data: bytes, place: int) -> None:
    with pytest.raises(WireError, match=f"^the message is not UTF-8: byte {place} cannot stand there$"):
        parse_object(data)
    assert parse_object('{"a":"é"}'.encode()) == {"a": "é"}


def test_pairs_of_surrogates_are_characters() -> None:
    assert parse_object('{"a":"\\ud83d\\ude00 \\\\ud800"}') == {"a": "😀 \\ud800"}


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**38), 10**38)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=10,
)


@given(st.dictionaries(st.text(), json_values), st.booleans())
def test_what_is_json_is_read_as_it_is(value: dict[str, object], escaped: bool) -> None:
    assert parse_object(json.dumps(value, ensure_ascii=escaped)) == value


@given(st.text(alphabet='{}[]":,\\u0aDd8eEn' + "NItfrls.-+ \ud800é", max_size=30) | st.binary(max_size=20))
def test_anything_is_an_object_or_one_error(data: str | bytes) -> None:
    try:
        found: object = parse_object(data)
    except WireError as error:
        found = str(error)
    assert isinstance(found, dict | str)
    assert isinstance(found, dict) or 0 < len(found.encode("utf-8")) < 150


@given(json_values)
def test_shown_is_short_and_safe(value: object) -> None:
    assert len(shown(value)) < 450  # forty characters, each escaped
    assert not set(shown(value)) & set("\n\r\0")
    shown(value).encode("utf-8")


def test_shown_says_how_much_it_leaves_out() -> None:
    assert shown("x" * 40) == repr("x" * 40)
    assert shown("x" * 41) == f"{'x' * 40!r}... (41 characters)"
    assert shown(string.ascii_letters) == f"{string.ascii_letters[:40]!r}... (52 characters)"
    assert [shown(v) for v in (None, True, False, {}, [], 5, 0.5)] == [
        "null", "true", "false", "an object", "an array", "5", "0.5"
    ]  # fmt: skip
