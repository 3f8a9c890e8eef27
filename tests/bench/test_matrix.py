"""Matrices: names, a user's YAML, and one clear line for what is wrong with it."""

import json

import pytest

from workbench.bench.matrix import check_ranks, load_matrix
from workbench.bench.sweep import open_sweep
from workbench.case import local_matrix, reference_matrix
from workbench.errors import InputError


@pytest.fixture
def yaml_file(tmp_path):
    def write(text):
        path = tmp_path / "my.yaml"
        path.write_text(text)
        return path

    return write


def test_named_matrices():
    assert load_matrix("local") == local_matrix()
    assert load_matrix("reference") == reference_matrix()


def test_lists_and_excludes(yaml_file):
    path = yaml_file(
        "pipeline: [standard, alltoall]\nmode: [inference, training]\nep: [1, 2]\nF: 64\n"
        "imbalance: [1, 2]\nexclude:\n- {ep: 1, imbalance: 2}\n- {pipeline: alltoall, ep: 1}\n"
        "- {pipeline: alltoall, mode: [training]}\n"
    )
    found = {(c.pipeline, c.mode, c.ep, c.imbalance, c.F) for c in load_matrix(path)}
    assert found == {
        ("standard", "inference", 1, 1, 64),
        ("standard", "training", 1, 1, 64),
        ("standard", "inference", 2, 1, 64),
        ("standard", "training", 2, 1, 64),
        ("standard", "inference", 2, 2, 64),
        ("standard", "training", 2, 2, 64),
        ("alltoall", "inference", 2, 1, 64),
        ("alltoall", "inference", 2, 2, 64),
    }


def test_profiles_of_one_s_own(yaml_file):
    (case,) = load_matrix(
        yaml_file("pipeline: standard\nmode: training\nprofile: mine\nprofiles: {mine: [1.5, 0.5]}")
    )
    assert (case.category, case.profile, case.factors) == ("packing", "mine", (1.5, 0.5))


def test_a_part_of_a_named_matrix(yaml_file):
    cases = load_matrix(yaml_file("base: reference\nep: 8\nexclude: [{precision: mxfp8}]"))
    assert {(c.ep, c.precision) for c in cases} == {(8, "bf16")}
    assert len(cases) == 6


BAD = {
    "pipeline: [stadard]": "my.yaml: top level: pipeline='stadard' must be one of alltoall, ",
    "ep: 3": "my.yaml: E=8 must be divisible by ep=3",
    "ep: two": "my.yaml: ep[0]='two': Input should be a valid integer",
    "F: []": "F must have at least one value",
    "widht: 3": "my.yaml: widht=3: Extra inputs are not permitted",
    "exclude: [{widht: 3}]": "exclude: 'widht' must be a field of a case",
    "ep: 2\nexclude: [{ep: 2}]": "my.yaml: no case is left after its lists and excludes",
    "base: local\nep: 64": "my.yaml: no case is left after its lists and excludes",
    "ep: [1]\nF: [64]\nep: [2]": "my.yaml: not YAML: key 'ep' must not be given twice",
    "exclude: [{ep: 1, ep: 2}]": "key 'ep' must not be given twice",
    "base: 2020-99-99": "my.yaml: not YAML: month must be in 1..12",
    "ep: [1": "my.yaml: not YAML: while parsing a flow sequence",
    "- 1": "my.yaml: top level: must be a mapping of fields to lists",
    "imbalance: 4": "my.yaml: imbalance=4.0 must lie between 0 and 2",
    "profile: C": "my.yaml: profile='C' must be in profiles, or A or B",
}


@pytest.mark.parametrize("text", BAD)
def test_bad_yaml_is_one_clear_line(yaml_file, text):
    with pytest.raises(InputError) as raised:
        load_matrix(yaml_file(text))
    assert BAD[text] in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_matrix_that_is_no_file():
    with pytest.raises(InputError, match="matrix=lokal must be local or reference, or a YAML file"):
        load_matrix("lokal")


def test_ep_beyond_the_ranks():
    with pytest.raises(InputError, match="ep=2 must be at most ranks=1"):
        check_ranks(local_matrix(), 1)
    with pytest.raises(InputError, match="ep=1 must be divisible by nnodes=2"):
        check_ranks(local_matrix(), 2, nnodes=2)


def test_folders_that_are_refused(tmp_path):
    cases = local_matrix()
    out = tmp_path / "run"
    with pytest.raises(InputError, match="ep=2 must be at most ranks=1"):
        open_sweep(out, cases, ranks=1)
    assert not out.exists()
    with pytest.raises(InputError, match="holds no sweep to resume"):
        open_sweep(out, resume=True, ranks=2)
    open_sweep(out, cases, ranks=2)
    with pytest.raises(InputError, match="holds a sweep already; resume it"):
        open_sweep(out, cases, ranks=2)
    with pytest.raises(InputError, match="holds a sweep of other cases"):
        open_sweep(out, cases[:3], ranks=2, resume=True)
    assert open_sweep(out, ranks=2, resume=True).cases == cases
    state = json.loads((out / "sweep.json").read_text())
    (out / "sweep.json").write_text(json.dumps(state | {"version": "0.0.9"}))
    with pytest.raises(InputError, match=r"of moe-workbench 0\.0\.9, must be of"):
        open_sweep(out, ranks=2, resume=True)


def test_a_matrix_that_says_the_same_twice_by_reference_is_read(yaml_file):
    text = "ep: [1]\nK: [1, 2]\nexclude:\n  - &two {mode: training, K: 2}\n  - {<<: *two, K: 1}"
    assert {case.mode for case in load_matrix(yaml_file(text))} == {"inference"}


def test_a_matrix_of_millions_of_cases_is_refused_at_once(yaml_file):
    many = ", ".join(map(str, range(1, 400)))
    with pytest.raises(InputError, match="combinations=636804 must be at most 100000"):
        load_matrix(yaml_file(f"ep: 1\nF: [{many}]\nT: [{many}]"))
