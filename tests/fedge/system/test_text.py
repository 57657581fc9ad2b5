from hypothesis import given
from hypothesis import strategies as st

from fedge.system.text import escape_controls


@given(st.text())
def test_what_is_shown_commands_no_terminal(line):
    shown = escape_controls(line)
    assert shown.isprintable()
    assert shown == line or not line.isprintable()


def test_what_was_there_can_be_told():
    assert escape_controls("fine: ü") == "fine: ü"
    assert escape_controls("\x1b[2J\r\n\x9b\u202e") == r"\x1b[2J\r\n\x9b\u202e"
