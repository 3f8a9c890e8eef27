"""Files that are whole or not there, their fingerprints, and how files of others are read."""

import hashlib
import json
import math
import os
import stat
import tempfile
from pathlib import Path
from typing import Any

from workbench.errors import InputError, one_line

MAX_BYTES = 1 << 26
"""What is read of a file at most, unless its reader says otherwise."""
MAX_DEPTH = 64
"""Lists and objects inside one another in a JSON file."""


def read_file(path: str | Path, limit: int = MAX_BYTES) -> bytes:
    """The content of a regular file. Raises InputError where it cannot be read, is a folder, a
    pipe or a device, or holds more than `limit` bytes.

    What is no regular file is refused before it is opened, since a pipe may never end. The limit
    holds for what is read: `stat` says 0 for files that the kernel makes up.
    """
    try:
        mode = os.stat(path).st_mode
        if stat.S_ISDIR(mode):
            raise InputError(f"{path}: cannot be read: Is a directory")
        if not stat.S_ISREG(mode):
            raise InputError(f"{path}: cannot be read: must be a regular file, no pipe or device")
        with open(path, "rb") as file:
            content = file.read(limit + 1)
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from None
    except InputError:
        raise
    except ValueError as error:  # a name that no file system takes
        raise InputError(f"{path}: cannot be read: {error}") from None
    if len(content) > limit:
        raise InputError(f"{path}: must have at most {limit} bytes")
    return content


def read_text(path: str | Path, limit: int = MAX_BYTES) -> str:
    """The UTF-8 text of a regular file, without a byte order mark. Raises InputError."""
    return _decoded(read_file(path, limit), path)


def read_json(path: str | Path) -> Any:
    """The strict JSON in a regular file: see `parse_json`. Raises InputError."""
    return parse_json(read_file(path), path)


def parse_json(content: str | bytes, place: str | Path) -> Any:
    """JSON that says one thing: UTF-8, no key given twice, numbers finite, integers of 64 bits, at
    most MAX_DEPTH lists and objects inside one another. Raises InputError naming `place` and rule.
    """

    def constant(text: str) -> float:
        raise InputError(f"{place}: {text} is not JSON; a number must be finite")

    def real(text: str) -> float:
        value = float(text)
        if not math.isfinite(value):
            raise InputError(f"{place}: {text} must be finite in 64 bits")
        return value

    def whole(text: str) -> int:
        if len(text) > 20 or not -(2**63) <= int(text) < 2**63:
            raise InputError(f"{place}: {one_line(text, 80)} must be an integer of 64 bits")
        return int(text)

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            seen: set[str] = set()
            twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
            raise InputError(f"{place}: key {one_line(repr(twice), 80)} must not be given twice")
        return found

    text = content if isinstance(content, str) else _decoded(content, place)
    try:
        found = json.loads(
            text, parse_constant=constant, parse_float=real, parse_int=whole, object_pairs_hook=once
        )
        _check_depth(found, MAX_DEPTH)
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise InputError(f"{place}: {where}: not JSON: {error.msg}") from None
    except RecursionError:
        raise InputError(
            f"{place}: must have at most {MAX_DEPTH} lists and objects inside one another"
        ) from None
    return found


def _check_depth(value: Any, left: int) -> None:
    if isinstance(value, dict | list):
        if not left:
            raise RecursionError
        for item in value.values() if isinstance(value, dict) else value:
            _check_depth(item, left - 1)


def _decoded(content: bytes, place: str | Path) -> str:
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"{place}: byte {error.start}: not UTF-8 text") from None


def write_atomic(path: Path, content: str | bytes) -> None:
    """Write a file under its final name only when it is complete; until then the old one stays.
    Makes its folder. Raises InputError where it cannot be written."""
    data = content.encode() if isinstance(content, str) else content
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            # a temporary file is private; give it the mode that any new file gets
            umask = os.umask(0)
            os.umask(umask)
            os.chmod(temporary, 0o666 & ~umask)
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise
    except OSError as error:
        raise InputError(f"{path}: cannot be written: {error.strerror}") from None


def sha256(path: Path) -> str:
    """Hexadecimal SHA-256 of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
