"""The noise's Triton program: the words and normals of the kernel in C, in the interpreter, compiled, and on a GPU."""

from pathlib import Path

import pytest
from interpreter import outcome, results

from clipping.accel import cuda

pytestmark = pytest.mark.skipif(not cuda._has_triton(), reason="Triton is not installed")


@pytest.mark.slow
def test_in_the_interpreter():
    found = results("noise_checks.py", TRITON_INTERPRET="1")
    assert found and found == dict.fromkeys(found)


@pytest.mark.slow
@pytest.mark.parametrize("capability", ["80", "90"])
def test_compiles_without_a_gpu_and_stays_in_registers(capability: str, tmp_path: Path):
    found = results("noise_checks.py", "compile", capability, TRITON_CACHE_DIR=str(tmp_path), TRITON_INTERPRET="0")
    assert found == {"fp32": None, "fp64": None}


@pytest.mark.gpu
def test_on_a_gpu():
    from noise_checks import CHECKS

    assert {name: outcome(check, "cuda") for name, check in CHECKS.items()} == dict.fromkeys(CHECKS)
