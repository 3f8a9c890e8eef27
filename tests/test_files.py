import os
import stat

import pytest

from workbench.errors import InputError
from workbench.files import sha256, write_atomic


def test_a_write_that_fails_leaves_nothing(tmp_path, monkeypatch):
    def full(fd):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(InputError, match=r"x\.json: cannot be written: No space left"):
        write_atomic(tmp_path / "x.json", "{}")
    assert os.listdir(tmp_path) == []


def test_write_atomic_makes_folders_and_a_readable_file(tmp_path):
    write_atomic(tmp_path / "a" / "b.txt", "é")
    assert (tmp_path / "a" / "b.txt").read_bytes() == b"\xc3\xa9"
    assert stat.S_IMODE((tmp_path / "a" / "b.txt").stat().st_mode) == 0o644
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot be written"):
        write_atomic(tmp_path / "file" / "b.txt", "x")


def test_text_that_cannot_be_encoded_leaves_the_old_file(tmp_path):
    write_atomic(tmp_path / "x", "old")
    with pytest.raises(UnicodeEncodeError):
        write_atomic(tmp_path / "x", "new \ud800")
    assert (tmp_path / "x").read_text() == "old"
    assert os.listdir(tmp_path) == ["x"]


def test_sha256_of_a_known_text(tmp_path):
    (tmp_path / "x").write_bytes(b"abc")
    assert sha256(tmp_path / "x") == (
        "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    )
