"""What reaches a terminal."""

from voicechat_core.terminal import printable


def test_text_stays_one_line_and_cannot_move_the_cursor() -> None:
    assert printable("a\x1b[2J\x07\nb\r\u202ec") == "a�[2J�\\nb��c"
    assert printable("two\nlines", " ") == "two lines"
    assert printable("Grüße, 世界") == "Grüße, 世界"
