"""Files that are whole or not there, and their fingerprints."""

import hashlib
import os
import tempfile
from pathlib import Path

from workbench.errors import InputError


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
