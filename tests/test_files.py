import os
import stat
from pkgutil import resolve_name

import pytest

from workbench.errors import InputError
from workbench.files import parse_json, read_file, sha256, write_atomic


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


def test_only_regular_files_are_read_and_no_more_than_the_limit(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for place, rule in (
        (tmp_path / "pipe", "must be a regular file, no pipe or device"),
        ("/dev/zero", "must be a regular file"),
        (tmp_path, "cannot be read: Is a directory"),
        (tmp_path / "none", "cannot be read: No such file"),
        ("a\0b", "cannot be read: .*null byte"),
        ("x" * 300, "cannot be read: File name too long"),
    ):
        with pytest.raises(InputError, match=rule):
            read_file(place)
    (tmp_path / "ten").write_bytes(b"0123456789")
    assert read_file(tmp_path / "ten", 10) == b"0123456789"
    with pytest.raises(InputError, match="ten: must have at most 9 bytes"):
        read_file(tmp_path / "ten", 9)
    # the kernel says that it has no bytes
    with pytest.raises(InputError, match="must have at most 5 bytes"):
        read_file("/proc/self/status", 5)


LOADERS = {
    "results.json": "workbench.records.results:load_table",
    "x.record.json": "workbench.records.record:read_record",
    "job.json": "workbench.bench.job:read_job",
    "calibration.json": "workbench.model.calibration:load_calibration",
    "hardware.toml": "workbench.hardware:known_devices",
    "matrix.yaml": "workbench.bench.matrix:load_matrix",
    "trace.csv": "workbench.explore.trace:load_trace",
    "trace.npz": "workbench.explore.trace:load_trace",
    "n.ipynb": "workbench.runner.parameters:notebook_parameters",
}


@pytest.mark.parametrize("name", LOADERS)
def test_no_loader_waits_for_a_pipe_or_reads_a_device(tmp_path, name):
    loader = resolve_name(LOADERS[name])
    os.mkfifo(tmp_path / name)
    with pytest.raises(InputError, match="must be a regular file"):
        loader(tmp_path / name)
    (tmp_path / name).unlink()
    (tmp_path / name).symlink_to("/dev/zero")
    with pytest.raises(InputError, match="must be a regular file"):
        loader(tmp_path / name)


@pytest.mark.parametrize("name", [name for name in LOADERS if name.endswith(("json", "ipynb"))])
@pytest.mark.parametrize(
    ("content", "rule"),
    [
        (b'{"a": 1, "b": {"c": 1, "c": 2}}', "key 'c' must not be given twice"),
        (b"[" * 100_000 + b"]" * 100_000, "at most 64 lists and objects inside one another"),
        (b"[" * 65 + b"]" * 65, "at most 64 lists and objects inside one another"),
        (b"9" * 20_000, "999 must be an integer of 64 bits"),
        (b"-9223372036854775809", "must be an integer of 64 bits"),
        (b"[1e999]", "1e999 must be finite in 64 bits"),
        (b"[NaN]", "NaN is not JSON; a number must be finite"),
        (b'"\xff"', "byte 1: not UTF-8 text"),
        (b"\xff\xfe{\0}\0", "byte 0: not UTF-8 text"),
    ],
)
def test_json_that_says_two_things_or_too_much_is_refused(tmp_path, name, content, rule):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=rule):
        resolve_name(LOADERS[name])(tmp_path / name)


def test_json_within_the_rules_is_read():
    text = '\ufeff{"a": [-9223372036854775808, 0.5, "é", null, true]}'
    assert parse_json(text.encode(), "x") == {"a": [-(2**63), 0.5, "é", None, True]}
    assert parse_json("[" * 64 + "]" * 64, "x")
