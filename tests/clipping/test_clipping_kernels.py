"""Kernels: exact in Triton's interpreter and on a GPU, compiled for GPUs that need not be here, refused elsewhere."""

import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from interpreter import outcome, results
from kernel_checks import CHECKS, COMPILED, NORMS, QUICK, embedding_gram_norm, gradient_norm, gram_norm
from marks import slow_unless
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from waiting import ROOT, python

from clipping.accel import cuda
from clipping.accel.cuda import supported
from clipping.accel.ways import GRAM_KERNEL, NORM_KERNEL
from clipping.rules.linear import LinearWeight
from dpbench.measure.simulate import StorageLifetimes

TRITON = pytest.mark.skipif(not cuda._has_triton(), reason="Triton is not installed")


@cache
def interpreted(*names: str) -> dict[str, str | None]:
    return results("kernel_checks.py", *names, TRITON_INTERPRET="1")


@TRITON
@pytest.mark.parametrize("name", slow_unless(lambda name: name in QUICK, CHECKS))
def test_exact_in_the_interpreter(name: str):
    names = QUICK if name in QUICK else sorted(set(CHECKS) - set(QUICK))
    found = interpreted(*names)
    assert found.keys() == set(names) and found[name] is None, found[name]


@TRITON
@pytest.mark.slow
@pytest.mark.parametrize(
    ("capability", "end"),
    [*product(("80", "90"), ("fused", "torch.float32", "torch.bfloat16")), ("90", "torch.float16")],  # as bfloat16
)
def test_compiles_without_a_gpu_and_keeps_its_tile_in_registers(capability: str, end: str, tmp_path: Path):
    """For the sizes that take the largest tiles."""
    variables = {"TRITON_CACHE_DIR": str(tmp_path), "TRITON_INTERPRET": "0"}
    found = results("kernel_checks.py", "compile", capability, end, **variables)
    assert len(found) >= 6 and found == {name: None for name in COMPILED if name.endswith(end)}


@pytest.mark.gpu
@TRITON
@pytest.mark.parametrize("name", CHECKS)
def test_exact_on_a_gpu(name: str):
    assert outcome(CHECKS[name], "cuda") is None


SMALL = 2**20
"""Bytes of `norms_of_large_layers`, where two Gram matrices take 128 MiB, and a gradient 3 or 2.3 MiB."""


def norms_of_large_layers() -> tuple[Sequence[Tensor], list[Callable[[], Tensor]]]:
    """The operands of a linear layer and of a convolution, and their norms by each kernel."""
    a, g = torch.randn(2, 4096, 768, device="cuda"), torch.randn(2, 4096, 1024, device="cuda")
    x = torch.randn(4, 256, 32, 32, device="cuda")
    options: Any = (([3, 3], [1, 1], [1, 1], [1, 1]), 1, (0.0, 0.0))
    images = (lambda norms=norms: norms(x, x, *options) for norms in NORMS)
    return (a, g, x), [lambda: gram_norm(a, g), lambda: gradient_norm(a, g), *images]


@pytest.mark.gpu
def test_neither_gram_matrices_nor_gradients_are_in_memory_on_a_gpu():
    _operands, norms = norms_of_large_layers()
    for norm in norms:
        norm()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        norm()
        assert torch.cuda.max_memory_allocated() - before < SMALL


@pytest.fixture
def fake_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Tensors that say they are on a CUDA device of the right kind."""
    monkeypatch.setattr(cuda, "_capability", lambda device: (9, 0))
    with FakeTensorMode():
        yield


@TRITON
def test_a_simulated_step_takes_the_memory_of_a_launch_and_launches_nothing(fake_gpu: None):
    a, g = torch.empty(3, 130, 20, device="cuda"), torch.empty(3, 130, 70, device="cuda")
    with StorageLifetimes() as lifetimes:
        lifetimes.watch(a), lifetimes.watch(g)
        for norm, numbers in (
            (gram_norm, 4 * (6 + 1)),  # four of each pair of blocks, and their sum
            (gradient_norm, 2 + 2 * 130 + 4),  # of two tiles, of rows of both operands, and together
        ):
            before = lifetimes.peak = lifetimes.alive
            found = norm(a, g)
            assert (found.shape, found.dtype, found.device.type) == ((3,), torch.float32, "cuda")
            assert lifetimes.peak - before == 3 * 4 * numbers
            del found
    image = torch.empty(2, 4, 6, 6, device="cuda")
    with StorageLifetimes() as lifetimes:
        lifetimes.watch(image)
        before = lifetimes.peak = lifetimes.alive
        found = cuda.gram_norms(image, image, [[3, 3], [1, 1], [1, 1], [1, 1]], 2, (0.0, 0.0))
        assert found.shape == (4, 4) and lifetimes.peak - before == 2 * 2 * 4 * 4  # four numbers for each tile
    assert embedding_gram_norm(torch.empty(3, 130, dtype=torch.int64, device="cuda"), g).shape == (3,)


@TRITON
def test_neither_gram_matrices_nor_gradients_are_in_memory(fake_gpu: None):
    operands, norms = norms_of_large_layers()
    for norm in norms:
        with StorageLifetimes() as lifetimes:
            for x in operands:
                lifetimes.watch(x)
            before = lifetimes.alive
            norm()
        assert 0 < lifetimes.peak - before < SMALL


@TRITON
def test_supported_where_a_program_can_run(fake_gpu: None, monkeypatch: pytest.MonkeyPatch):
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        x = torch.empty(2, 3, dtype=dtype, device="cuda")
        assert supported(x) and supported(torch.empty(2, dtype=torch.int64, device="cuda"), x)
        for other in (x.to("cpu"), x.double(), x.to("cuda:1")):
            assert not supported(x, other)
    old, amd, without = (
        (cuda, "_capability", lambda _: (7, 5)),
        (torch.version, "hip", "7.2.0"),
        (cuda, "_has_triton", bool),
    )
    for where, name, value in (old, amd, without):
        with monkeypatch.context() as patch:
            patch.setattr(where, name, value)
            assert not supported(x)
    seen = []
    torch.func.vmap(lambda x: seen.append(supported(x)) or x)(x)
    assert seen == [False]


@pytest.fixture
def launch(monkeypatch: pytest.MonkeyPatch) -> Iterator[Mock]:
    """A device that is there, and a mock in the place of a launch."""
    monkeypatch.setattr(cuda, "launch", launch := Mock())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    full = torch.full
    monkeypatch.setattr(torch, "full", lambda size, value, device: full(size, value))
    cuda.trouble.cache_clear()
    yield launch
    cuda.trouble.cache_clear()


def number(value: float) -> Callable[..., None]:
    """A launch that gives this number."""

    def launch(program: str, each: int, tensors: Sequence[Tensor], *given: Any, **named: Any) -> None:
        tensors[-1].fill_(value)

    return launch


@pytest.mark.parametrize(
    "answer, said",
    [
        (RuntimeError("Failed to find C compiler. Please specify via CC"), "RuntimeError: Failed to find C compiler"),
        (PermissionError(13, "Permission denied", "/root/.triton"), "PermissionError: .*Permission denied"),
        (number(35.0), "a program computed 35.0 for 36.0"),
        (number(float("nan")), "a program computed nan for 36.0"),
    ],
)
@TRITON
def test_where_triton_cannot_launch_torchs_operations_remain_and_it_is_said_once(answer, said, fake_gpu, launch):
    launch.side_effect, x = answer, torch.empty(2, 3, device="cuda")
    with pytest.warns(RuntimeWarning, match=f"{said}.*torch's operations run instead"):
        assert not supported(x)
    assert not supported(x) and launch.call_count == 1
    rule = LinearWeight(x, torch.empty(2, 5, 3, device="cuda"))
    assert not {GRAM_KERNEL, NORM_KERNEL} & set(rule.ghosts)


@TRITON
def test_no_memory_to_find_out_is_no_reason(fake_gpu, launch):
    launch.side_effect, x = torch.OutOfMemoryError("no memory"), torch.empty(2, 3, device="cuda")
    with pytest.raises(torch.OutOfMemoryError):
        supported(x)
    launch.side_effect = number(36.0)
    assert supported(x)


FRESH = """
import sys, torch, clipping.backends.tape, clipping.accel.cuda
assert not clipping.accel.cuda.supported(torch.zeros(2)) and "triton.language" not in sys.modules, "Triton"
from clipping.tape.compiled import compiled_modules
assert list(compiled_modules(torch.nn.Linear(2, 2))) == [] and "torch._dynamo" not in sys.modules, "the compiler"
from dpbench.measure.memory import measured_peak
assert measured_peak(lambda: torch.zeros(1000).add(1), [], torch.device("cpu")).peak_bytes >= 8000
"""


@pytest.mark.slow
def test_a_fresh_process_imports_no_compiler_and_measuring_writes_nothing_to_standard_error():
    """A trial's standard error is evidence, and the profiler's library reads its log level once."""
    done = subprocess.run([sys.executable, "-c", FRESH], capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.slow
def test_the_kernels_are_imported_without_triton():
    python("-c", "import sys\nsys.modules['triton'] = None\nimport clipping.backends.tape, clipping.accel.cuda")
