"""A launch has one key to Triton's code, whatever rank, entry or call it is of."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from workbench.kernels.device import INTERPRETER, Launch, prepare


@pytest.fixture(scope="module")
def found():
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("launch_keys.py"))],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_no_rank_entry_or_call_compiles_again(found):
    assert {label: keys for label, keys in found["keys"].items() if keys != 1} == {}
    assert len(found["keys"]) >= 40
    assert found["launches"]["route_table, , 2"] > 6 * 3  # ranks, at every address
    assert found["launches"]["decide, , 0"] > 15 * 3  # ranks, entries and offsets


def test_every_argument_left_to_triton_is_noticed(found):
    assert [mutant for mutant, noticed in found["mutants"].items() if not noticed] == []
    assert {"decide_kernel: rank", "decide_kernel: entry", "starts_kernel: first_key"} < set(
        found["mutants"]
    )
    assert len(found["mutants"]) > 150


def test_the_interpreter_has_nothing_to_prepare():
    prepare([Launch(kernel=None, grid=INTERPRETER.sms, args={})])
