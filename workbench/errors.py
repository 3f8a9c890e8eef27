"""The one exception that means: the input is wrong, not the program; and checks that raise it."""

import math
import numbers
from collections.abc import Callable

MAX_LENGTH = 480
"""Characters of a message at most: with what a command line puts before it, one line of 500."""
MAX_WHOLE = 2**31 - 1
"""The largest count of anything: beyond it, products of counts leave 64 bits."""


class InputError(ValueError):
    """Bad input. The message is one line that names the place, the value and the rule.

    Whatever it quotes, it stays one line of at most MAX_LENGTH characters: line breaks and other
    characters that cannot be printed are escaped, the middle of what is longer is left out. The
    command line prints it without a traceback and exits with code 2.
    """

    def __init__(self, message: object = "") -> None:
        super().__init__(one_line(str(message)))

    def _render_traceback_(self) -> list[str]:
        """What IPython shows in place of a traceback: a notebook's cell too says just the line."""
        return [f"{type(self).__name__}: {self}"]


def one_line(text: str, length: int = MAX_LENGTH) -> str:
    """`text` as one printable line of at most `length` characters."""
    return shortened(text, length, _escaped)


def shortened(text: str, length: int, escaped: Callable[[str], str] = str) -> str:
    """`text` with its middle left out where it has more than `length` characters."""
    # what is left out needs no escaping, and a text may have millions of characters
    head, tail = escaped(text[:length]), escaped(text[-length:])
    if len(text) <= length and len(head) <= length:
        return head
    left_out = f" ... ({len(text):,} characters) ... "
    kept = max(length - len(left_out), 2)
    return head[: kept - kept // 2] + left_out + tail[-(kept // 2) :]


def _escaped(text: str) -> str:
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def check_whole(name: str, value: object, least: int = 1, most: int = MAX_WHOLE) -> int:
    """`value` as an int: a whole number of Python's or numpy's, no bool. Raises InputError."""
    if not isinstance(value, numbers.Integral) or isinstance(value, bool):
        raise InputError(f"{name}={_shown(value)} must be an integer of at least {least}")
    found = int(value)
    if not least <= found <= most:
        rule = f"must be at least {least}" if found < least else f"must be at most {most}"
        raise InputError(f"{name}={_shown(found)} {rule}")
    return found


def check_number(name: str, value: object) -> float:
    """`value` as a finite float; a bool or a text is none. Raises InputError."""
    if not isinstance(value, numbers.Real) or isinstance(value, bool):
        raise InputError(f"{name}={_shown(value)} must be a number")
    try:
        found = float(value)
    except OverflowError:
        found = math.inf
    if not math.isfinite(found):
        raise InputError(f"{name}={_shown(value)} must be finite")
    return found


def _shown(value: object) -> str:
    try:
        return one_line(repr(value), 80)
    except ValueError:  # an integer of more digits than Python prints
        return f"(an integer of {int(value).bit_length():,} bits)"  # type: ignore[call-overload]
