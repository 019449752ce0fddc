"""The noise's Triton program: the words and normals of the kernel in C, in the interpreter, compiled, and on a GPU."""

from pathlib import Path

import pytest
from interpreter import results

from clipping.accel import cuda

TRITON = pytest.mark.skipif(not cuda._has_triton(), reason="Triton is not installed")
NAMES = (
    "words_bit_by_bit",
    "normals_to_the_last_bits",
    "the_same_as_on_a_cpu",
    "divided_and_spoiled",
    "counters_of_many_groups",
    "a_program_that_fails_or_errs_is_not_taken",
    "a_step_of_the_engine",
)


@pytest.fixture(scope="module")
def interpreted() -> dict[str, str | None]:
    return results("noise_checks.py", TRITON_INTERPRET="1")


@TRITON
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.slow
def test_in_the_interpreter(name: str, interpreted: dict[str, str | None]):
    assert interpreted.keys() == set(NAMES) and interpreted[name] is None, interpreted[name]


@TRITON
@pytest.mark.slow
@pytest.mark.parametrize("capability", ["80", "90"])
def test_compiles_without_a_gpu_and_stays_in_registers(capability: str, tmp_path: Path):
    found = results("noise_checks.py", "compile", capability, TRITON_CACHE_DIR=str(tmp_path), TRITON_INTERPRET="0")
    assert found == {"fp32": None, "fp64": None}


@pytest.mark.gpu
@TRITON
@pytest.mark.parametrize("name", NAMES)
def test_on_a_gpu(name: str):
    from noise_checks import CHECKS

    CHECKS[name]("cuda")
