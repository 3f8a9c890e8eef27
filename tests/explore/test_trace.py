"""Traces: strict reading, and the placement of experts by longest processing time first."""

import itertools
import pickle
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from tests.explore.test_imbalance import uploaded
from workbench.errors import InputError
from workbench.explore.imbalance import ImbalanceExplorer, ImbalanceParameters
from workbench.explore.trace import Trace, load_trace, placed_rows, read_trace, scaled_counts

COUNTS = np.random.default_rng(0).integers(0, 500, (3, 384))


def csv(values: Any) -> bytes:
    return "\n".join(",".join(map(str, row)) for row in values).encode()


def test_csv_and_npz_say_the_same(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", counts=COUNTS, other=np.zeros(3))
    np.savez(tmp_path / "b.npz", COUNTS.astype(np.float32))
    expected = tuple(map(tuple, COUNTS.tolist()))
    for trace in (
        load_trace(tmp_path / "a.npz"),
        load_trace(tmp_path / "b.npz"),
        read_trace("c.csv", csv(COUNTS)),
        read_trace("c.csv", csv([[f"e{n}" for n in range(384)], *COUNTS])),
        read_trace("c.csv", b"\xef\xbb\xbf" + csv(COUNTS) + b"\n\n"),
    ):
        assert trace.counts == expected
    labelled = (
        b"layer,"
        + csv([[f"e{n}" for n in range(384)]])
        + b"\n"
        + csv([[n, *row] for n, row in enumerate(COUNTS)])
    )
    assert read_trace("c.csv", labelled).counts == expected


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("t.csv", b"1,2\n3,-1", "t.csv: layer 1, expert 1: count=-1 must not be negative"),
        ("t.csv", b"1,nan", "t.csv: layer 0, expert 1: count=nan must be finite"),
        ("t.csv", b"1,inf", "count=inf must be finite"),
        ("t.csv", b"1,1.5", "t.csv: layer 0, expert 1: count=1.5 must be a whole number"),
        ("t.csv", b"1,2\n0,0", "t.csv: layer 1: counts must not all be zero"),
        ("t.csv", b"1,2\n1", "t.csv: layer 1: experts=1 must be 2, as in layer 0"),
        ("t.csv", b"1,2\n1,x", "t.csv: layer 1, expert 1: count='x' must be a number"),
        ("t.csv", b"", "t.csv: must hold a line of counts for each layer"),
        ("t.csv", b"a,b", "t.csv: must hold a line of counts for each layer"),
        ("t.csv", b"\xff\xfe\x00", "t.csv: is not CSV text"),
        ("t.csv", b"1,1e300", "count=1e+300 must be below 2**53"),
        ("t.txt", b"1", "t.txt: must end in .csv or .npz"),
        ("t.npz", b"1,2", "t.npz: must hold one plain array: File is not a zip file"),
    ],
)
def test_bad_files(name: str, content: bytes, message: str) -> None:
    with pytest.raises(InputError) as error:
        read_trace(name, content)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


READ = np.array([[7, 5], [6, 9], [8, 2]])


@pytest.mark.parametrize(
    "head",
    [
        ",expert_0,expert_1",
        "layer_idx,expert_0,expert_1",
        "index,e0,e1",
        "Layer,a,b",
        ",0,1",
        "layer,0,1",
        "layer,1,2",
        "Unnamed: 0,expert_1,expert_2",
    ],
)
@pytest.mark.parametrize("labels", [(0, 1, 2), (3, 7, 60), ("first", "second", "third")])
def test_an_index_is_no_expert(head: str, labels: tuple[Any, ...]) -> None:
    lines = [head, *(f"{n},{a},{b}" for n, (a, b) in zip(labels, READ, strict=True))]
    assert read_trace("t.csv", "\r\n".join(lines).encode()).counts == tuple(map(tuple, READ))


def test_what_pandas_writes_is_read_or_refused() -> None:
    named = pd.DataFrame(READ, columns=["expert_0", "expert_1"])
    for text in (
        named.to_csv(),
        named.to_csv(index=False),
        named.to_csv(index_label="layer"),
        pd.DataFrame(READ).to_csv(),
        pd.DataFrame(READ).to_csv(index_label="layer_idx"),
        pd.DataFrame(READ).to_csv(index=False, header=False),
    ):
        assert read_trace("t.csv", text.encode()).counts == tuple(map(tuple, READ))
    with pytest.raises(InputError, match="line 1 counts up from 0: if it is a head, name the col"):
        read_trace("t.csv", pd.DataFrame(READ).to_csv(index=False).encode())
    with pytest.raises(InputError, match="column 1 counts the lines from 0: if it is an index"):
        read_trace("t.csv", pd.DataFrame(READ).to_csv(header=False).encode())


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("1,2,3,4\n5,6,7,8", "line 1 counts up from 1"),
        ("a,b\n0,5\n1,6", "column 1 counts the lines from 0"),
        ("expert_0,expert_1,expert_10,expert_2\n1,2,3,4", "numbers that count up"),
        ("layer,expert_0,expert_1,total\n0,2,3,5", "one word with numbers that count up"),
        ("step,expert_0,expert_1\n0,2,3", "after a column `layer` or none; found step,"),
        ("layer,a,a\n0,2,3", "column 'a' must not be there twice"),
        ("layer,expert,count\n0,0,5\n0,1,6", "layer='0' must not be there twice: a line for"),
        ("layer,a,b\n1,2,3\n0,2,3", "line 1: layer=0 must be above 1"),
        ("5,x,7\n1,2,3", "layer 0, expert 1: count='x' must be a number"),
        (",5,7\n1,2,3", "layer 0, expert 0: count='' must be a number"),
        ("5,6\n,\n7,8", "layer 1, expert 0: count='' must be a number"),
        ("5,1_000", "count='1_000' must be a number"),
        ("5,\u0661", "must be a number"),
        ("5\t6\n7\t8", "line 1: must be separated by commas, not tabs"),
        ("a,b\n5;6", "line 2: must be separated by commas, not semicolons"),
        ("5,6\r7,8", r"line 1: lines must end in \\n or \\r\\n, not in a bare \\r"),
        ("5,6\r\r\n7,8", "not in a bare"),
        ('"5,6\n7,8', "is not CSV text: unexpected end of data"),
        ("layer,a\n0,2,3", "line 1 names 2 columns, layer 0 has 3"),
    ],
)
def test_what_cannot_be_told_is_refused(content: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        read_trace("t.csv", content.encode())


@pytest.mark.parametrize(
    ("suffix", "how"),
    [
        (".npy", r"np.savez\('trace.npz', counts=np.load\('t.npy'\)\)"),
        (".pt", r"counts=torch.load\('t.pt'\).numpy\(\)\)"),
        (".json", r"counts=np.array\(json.load\(open\('t.json'\)\)\)\)"),
    ],
)
def test_other_files_are_told_how_to_become_a_trace(suffix: str, how: str) -> None:
    with pytest.raises(InputError, match=r"must end in .csv or .npz; to convert: .*" + how):
        read_trace(f"t{suffix}", b"")


def npz(folder: Path, **arrays: Any) -> Path:
    np.savez(folder / "t.npz", **arrays)
    return folder / "t.npz"


def test_bad_archives(tmp_path: Path) -> None:
    class Harmful:
        def __reduce__(self) -> Any:
            return (Path.touch, (tmp_path / "ran",))

    hostile = np.empty((1, 1), object)
    hostile[0, 0] = Harmful()
    with pytest.raises(InputError, match="which are never unpickled"):
        load_trace(npz(tmp_path, counts=hostile))
    with zipfile.ZipFile(tmp_path / "t.npz", "w") as archive:
        archive.writestr("counts.npy", b"")
        with pytest.warns(UserWarning, match="Duplicate"):
            archive.writestr("counts.npy", b"")
    with pytest.raises(InputError, match="holds counts, counts"):
        load_trace(tmp_path / "t.npz")
    whole = npz(tmp_path, counts=COUNTS).read_bytes()
    damaged = whole.replace(b"NUMPY\x01\x00v\x00", b"NUMPY\x01\x00v\x28")
    for content in (damaged, whole[:-30], whole[:40] + b"\xff" * 3000 + whole[40:]):
        with pytest.raises(InputError) as error:
            read_trace("t.npz", content)
        assert len(str(error.value)) < 300
    with pytest.raises(InputError, match="must hold one array, or one named counts; holds a, b"):
        load_trace(npz(tmp_path, a=COUNTS, b=COUNTS))
    with pytest.raises(InputError, match="ndim=1 must be 2"):
        load_trace(npz(tmp_path, a=COUNTS[0]))
    with pytest.raises(InputError, match="dtype=<U1 must be a number type"):
        load_trace(npz(tmp_path, a=np.array([["x"]])))
    with pytest.raises(InputError, match=r"shape=\(0, 4\) must hold at least one"):
        load_trace(npz(tmp_path, a=np.zeros((0, 4))))
    with zipfile.ZipFile(tmp_path / "t.npz", "w") as archive:
        archive.writestr("counts.npy", pickle.dumps(Harmful()))
    with pytest.raises(InputError, match="must hold one plain array"):
        load_trace(tmp_path / "t.npz")
    header = b"{'descr': '<f8', 'fortran_order': False, 'shape': (1000000, 1000000), }"
    header += b" " * (117 - len(header)) + b"\n"
    with zipfile.ZipFile(tmp_path / "t.npz", "w") as archive:
        start = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little")
        archive.writestr("counts.npy", start + header)
    with pytest.raises(InputError, match="more than the file holds"):
        load_trace(tmp_path / "t.npz")
    with pytest.raises(InputError, match="cannot be read"):
        load_trace(tmp_path / "missing.csv")
    assert not (tmp_path / "ran").exists(), "nothing in a file may run"


def test_bad_traces_in_the_widget_are_messages(tmp_path: Path) -> None:
    explorer = ImbalanceExplorer()
    explorer.widget()
    before = explorer.view

    def upload(content: bytes) -> None:
        uploaded(explorer, "t.csv", content)

    upload(b"1,-2")
    assert "t.csv: layer 0, expert 1: count=-2 must not be negative" in explorer.file_message
    assert explorer.view is before
    assert explorer.problem == ""
    upload(csv(COUNTS[:, :100]))
    assert explorer.problem == "t.csv: experts=100 must be E=384"
    assert explorer.problem in explorer.message
    with pytest.raises(InputError, match="experts=100 must be E=384"):
        explorer.table()
    upload(csv(COUNTS))
    assert (explorer.problem, explorer.message) == ("", "")
    assert explorer.file_message == "t.csv: 3 layers x 384 experts"
    path = tmp_path / "t.csv"
    path.write_bytes(csv(COUNTS[:, :100]))
    with pytest.raises(InputError, match="experts=100 must be E=384"):
        ImbalanceExplorer(ImbalanceParameters(trace=str(path)))


def test_a_load_that_distinct_experts_cannot_give_is_explained(tmp_path: Path) -> None:
    counts = np.ones((1, 384), int)
    counts[0, 0] = 10**6
    path = tmp_path / "t.csv"
    path.write_bytes(csv(counts))
    fine = ImbalanceExplorer(ImbalanceParameters(trace=str(path)))
    assert fine.table()["iterationMS"].notna().any()
    with pytest.raises(InputError, match=r"t\.csv: imbalance=.* must lie between 0 and"):
        ImbalanceExplorer(ImbalanceParameters(trace=str(path), ep=384))


def test_scaled_counts_add_up() -> None:
    trace = Trace(name="t", counts=((1, 1, 1), (5, 0, 3)))
    scaled = scaled_counts(trace, 10)
    assert scaled.tolist() == [[4, 3, 3], [6, 0, 4]]


def best(rows: tuple[int, ...], ep: int) -> int:
    """The least possible busiest rank, by trying every placement."""
    size, found = len(rows) // ep, 10**9

    def fill(left: frozenset[int], worst: int) -> None:
        nonlocal found
        if not left:
            found = min(found, worst)
            return
        first = min(left)
        for others in itertools.combinations(sorted(left - {first}), size - 1):
            load = rows[first] + sum(rows[n] for n in others)
            if max(worst, load) < found:
                fill(left - {first, *others}, max(worst, load))

    fill(frozenset(range(len(rows))), 0)
    return found


@pytest.mark.parametrize("seed", range(30))
def test_placement_is_near_the_best_and_never_worse_than_before(seed: int) -> None:
    rng = np.random.default_rng(seed)
    ep, size = [(2, 4), (4, 2), (3, 3)][seed % 3]
    rows = tuple(rng.integers(0, 100, ep * size).tolist())
    placed = placed_rows(rows, ep)
    assert sum(placed) == sum(rows)
    assert len(placed) == ep
    before = np.reshape(rows, (ep, size)).sum(axis=1).max()
    assert best(rows, ep) <= max(placed) <= min(before, 4 / 3 * best(rows, ep) + 1e-9)


def test_placement_by_hand() -> None:
    # longest first: 9 -> 0, 7 -> 1, 6 -> 1 (7 < 9), so rank 1 is full; 1 -> 0
    assert placed_rows((9, 7, 6, 1), 2) == (10, 13)
    assert placed_rows((5, 5, 5, 5), 4) == (5, 5, 5, 5)
