"""Every message is one line that can be printed and read."""

import pickle

import numpy as np
import pytest

from workbench.errors import MAX_LENGTH, InputError, check_number, check_whole


def test_a_message_is_one_short_line_with_both_of_its_ends():
    message = str(InputError("file.json: name=" + "x" * 20_000_000 + " must be short"))
    assert len(message) <= MAX_LENGTH
    assert message.startswith("file.json: name=xxx")
    assert message.endswith("xxx must be short")
    assert "(20,000,030 characters)" in message
    assert str(InputError("a\nb\r\x00\u2028\ud800é")) == "a\\nb\\r\\x00\\u2028\\ud800é"
    assert len(str(InputError("\n" * 1000))) <= MAX_LENGTH
    assert str(InputError("as it is")) == "as it is"
    assert str(pickle.loads(pickle.dumps(InputError("a\nb")))) == "a\\nb"


@pytest.mark.parametrize(
    ("value", "rule"),
    [
        (None, "T=None must be an integer of at least 1"),
        ("8", "T='8' must be an integer"),
        (True, "T=True must be an integer"),
        (8.0, "T=8.0 must be an integer"),
        (0, "T=0 must be at least 1"),
        pytest.param(
            10**5000, r"T=\(an integer of 16,610 bits\) must be at most 2147483647", id="huge"
        ),
        ([8], r"T=\[8\] must be an integer"),
    ],
)
def test_what_is_no_count(value, rule):
    with pytest.raises(InputError, match=rule):
        check_whole("T", value)
    assert check_whole("T", np.int32(8)) == 8


@pytest.mark.parametrize(
    ("value", "rule"),
    [
        (None, "f=None must be a number"),
        ("1", "f='1' must be a number"),
        (True, "f=True must be a number"),
        (float("nan"), "f=nan must be finite"),
        pytest.param(10**400, "must be finite", id="huge"),
        (1j, "f=1j must be a number"),
    ],
)
def test_what_is_no_number(value, rule):
    with pytest.raises(InputError, match=rule):
        check_number("f", value)
    assert check_number("f", np.float32(0.5)) == 0.5
