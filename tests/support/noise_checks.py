"""Checks the noise's Triton program in Triton's interpreter, and compiles it for GPUs.

The interpreter must be chosen before Triton is imported, so `test_noise_program.py` runs this file as a process:

    TRITON_INTERPRET=1 python tests/support/noise_checks.py      run all checks: {name: error or null}
    python tests/support/noise_checks.py compile 90              compile, GPU or not: {dtype of the sums: error or null}
"""

import warnings
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import triton
import triton.language as tl
from interpreter import compiled, main
from torch import Tensor, nn

from clipping.accel import cpu, cuda
from clipping.noise import chacha as noise
from clipping.noise import chacha_program as noise_program
from clipping.noise.chacha import Segments, _normals, add_to_flat, words
from clipping.numerics.products import full_precision
from dpbench import PrivacyEngine

KEY = bytes(range(100, 132))
COUNTS, LABELS = (300, 1, 128, 0, 2000), (0, 2**31, 7, 8, 2**32 - 1)
PLACE = 2**32 - 2, 2**31 + 5


@triton.jit
def cipher_words(out, k0, k1, k2, k3, k4, k5, k6, k7, first, step, process, label):
    """[16, 16]: the words of the 16 blocks from `first` on."""
    lane = tl.arange(0, 16)
    blocks = (lane + first).to(tl.uint32, bitcast=True)
    labels = (lane * 0 + label).to(tl.uint32, bitcast=True)
    found = noise_program.cipher((k0, k1, k2, k3, k4, k5, k6, k7), blocks, step, process, labels)
    for row in tl.static_range(16):
        tl.store(out + row * 16 + lane, found[row].to(tl.int32, bitcast=True))


def words_bit_by_bit(device: str) -> None:
    """Words equal those of torch's operations (RFC 8439), also where the counter and the nonce pass 2^31."""
    for key, nonce in ((KEY, (3, 1, 2)), (bytes(range(255, 223, -1)), (2**32 - 1, 5, 2**31))):
        for first in (0, 48, 2**31 - 16, 2**31 - 8, 2**32 - 16):
            out = torch.empty(16, 16, dtype=torch.int32, device=device)
            state = [noise._signed(word) for word in noise.state_of(key, first, nonce)]
            cipher_words[(1,)](out, *state[4:])
            assert torch.equal(out.cpu(), words(key, nonce, first, 16, "cpu")), (nonce, first)


def flat_of(dtype: torch.dtype, device: str) -> tuple[Segments, Tensor]:
    segments = Segments(COUNTS, LABELS)
    flat = torch.zeros(segments.length, dtype=dtype, device=device)
    for part in segments.parts(flat):
        part.copy_(torch.linspace(-40, 40, len(part), dtype=torch.float64))
    return segments, flat


def without_the_program(dtype: torch.dtype, **given: Any) -> list[Tensor]:
    """The sums of `flat_of` with noise, by the C kernel, or by torch's operations in the interpreter."""
    segments, flat = flat_of(dtype, "cpu")
    with patch.object(cuda, "supported", lambda *_: False):
        add_to_flat(flat, segments, 1.5, 2.0**-20, KEY, PLACE, **given)
    return segments.parts(flat)


def normals_to_the_last_bits(device: str) -> None:
    """Normals agree to 2^-48 in float64: a rounding changes them by 2^-50, a wrong word of the cipher by far more."""
    segments = Segments(COUNTS, LABELS)
    flat = torch.zeros(segments.length, dtype=torch.float64, device=device)
    add_to_flat(flat, segments, 1.0, 2.0**-50, KEY, PLACE)
    for part, count, label in zip(segments.parts(flat), COUNTS, LABELS, strict=True):
        wanted = _normals(words(KEY, (*PLACE, label), 0, 16 * -(-count // 128), "cpu"))[:count] if count else part.cpu()
        assert part.shape == wanted.shape
        worst = float((part.cpu() - wanted).abs().max()) if count else 0.0
        assert worst < 2**-48, f"{worst:.2e} from torch's operations, in the tensor of {count}"


def the_same_as_on_a_cpu(device: str) -> None:
    """Rounded to the grid, sums equal those of the C kernel, or of torch's operations if there is none."""
    for dtype in (torch.float32, torch.float64):
        segments, flat = flat_of(dtype, device)
        add_to_flat(flat, segments, 1.5, 2.0**-20, KEY, PLACE)
        for found, expected in zip(segments.parts(flat), without_the_program(dtype), strict=True):
            assert torch.equal(found.cpu(), expected), (dtype, len(expected))


def divided_and_spoiled(device: str) -> None:
    """Quotients equal those of a CPU; and where the flag is set, what the sums held does not count, NaN included."""
    for dtype in (torch.float32, torch.float64):
        for is_spoiled in (False, True):
            segments, flat = flat_of(dtype, device)
            flat[5:70] = torch.nan if is_spoiled else flat[5:70]
            spoiled, divided = torch.tensor(is_spoiled), {"divisor": 96.0}
            add_to_flat(flat, segments, 1.5, 2.0**-20, KEY, PLACE, spoiled=spoiled.to(device), **divided)
            expected = without_the_program(dtype, spoiled=spoiled, **divided)
            for mine, other in zip(segments.parts(flat), expected, strict=True):
                assert torch.equal(mine.cpu(), other), (dtype, is_spoiled, len(other))


def counters_of_many_groups(device: str) -> None:
    """Block numbers, 16 for each group, may pass 2^31, up to the largest in the tables."""
    for number in (0, 2**27 - 1, 2**27, 2**28 - 1):
        flat = torch.zeros(128, dtype=torch.float64, device=device)
        label = torch.tensor([5], dtype=torch.int32, device=device)
        numbers = torch.tensor([number], dtype=torch.int32, device=device)
        state = noise.state_of(KEY, 0, (*PLACE, 5))
        noise._launch(flat, label, numbers, (1.0, 2.0**-50, 2.0**50), state)
        assert float((flat.cpu() - _normals(words(KEY, (*PLACE, 5), 16 * number, 16, "cpu"))).abs().max()) < 2**-48, (
            number
        )


def a_program_that_fails_or_errs_is_not_taken(device: str) -> None:
    """It warns once, and torch's operations draw the same numbers."""
    launch, expected = noise._launch, without_the_program(torch.float32)

    def failing(*given: Any) -> None:
        raise RuntimeError("no C compiler")

    def erring(flat: Tensor, *given: Any) -> None:
        launch(flat, *given)
        flat[-1] += 1e-9

    for broken, reason in ((failing, "RuntimeError: no C compiler"), (erring, "it draws other numbers")):
        noise._agrees.cache_clear()
        with patch.object(noise, "_launch", broken), warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            for _ in range(2):
                segments, flat = flat_of(torch.float32, device)
                add_to_flat(flat, segments, 1.5, 2.0**-20, KEY, PLACE)
        noise._agrees.cache_clear()
        assert [reason in str(each.message) for each in said] == [True], [str(each.message) for each in said]
        for part, one in zip(segments.parts(flat), expected, strict=True):
            assert torch.equal(part.cpu(), one)


def a_step_of_the_engine(device: str) -> None:
    """A step of the engine with noise equals a CPU's: gradients bit for bit."""
    found = []
    for where in ("cpu", device):
        model = nn.Sequential(nn.Linear(9, 30), nn.LayerNorm(30), nn.Linear(30, 3)).to(where)
        engine = PrivacyEngine(model, batch_size=4, sample_size=100, max_grad_norm=1.0, noise_multiplier=1.0)
        engine.noise.load_state_dict({"kind": "secure", "key": KEY}, replay=True)
        engine.attach(torch.optim.SGD(model.parameters(), lr=0.0))
        with full_precision(convolutions=True):  # else a GPU's noise also covers operands rounded to TF32
            engine.empty_step()
        found.append(torch.cat([p.grad.flatten().cpu() for p in model.parameters()]))
    assert torch.equal(*found) and found[0].unique().numel() > 300


CHECKS = {
    check.__name__: check
    for check in (
        words_bit_by_bit,
        normals_to_the_last_bits,
        the_same_as_on_a_cpu,
        divided_and_spoiled,
        counters_of_many_groups,
        a_program_that_fails_or_errs_is_not_taken,
        a_step_of_the_engine,
    )
}


def compile_(element: str, capability: int) -> None:
    kinds = {"flat": f"*{element}", "labels": "*i32", "numbers": "*i32", "spoiled": "*i1"}
    kinds |= dict.fromkeys(("deviation", "unit", "finer"), "i64")
    constants = {"HAS_FLAG": True, "LANES": noise._LANES}
    compiled(noise_program.noisy, capability, kinds, constants, registers=64, num_warps=4)


if __name__ == "__main__":
    with patch.object(cpu, "supported", lambda *_: False):  # or the C kernel would be taken
        main(CHECKS, {element: partial(compile_, element) for element in ("fp32", "fp64")})
