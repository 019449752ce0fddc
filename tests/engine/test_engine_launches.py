"""What the engine asks of a GPU in a step: few launches, however many parameters, and never an answer.

Tensors of a CUDA device without values: whatever asked it for a number would raise. What is counted is all that comes
after the backend's clipped sums, but for the optimizer's own step.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from attached import attached
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from clipping.accel import cuda
from clipping.core.types import ClippedGradient
from clipping.noise import chacha as noise
from clipping.noise.chacha import Segments
from dpbench import PrivacyEngine
from dpbench.measure.launches import Launches

MOST = 60


@pytest.fixture
def triton(monkeypatch):
    """As on a machine with a GPU and Triton; the programs themselves are run elsewhere (`test_noise_program`)."""
    monkeypatch.setattr(cuda, "_capability", lambda device: (9, 0))
    monkeypatch.setattr(cuda, "_has_triton", lambda: True)
    tables, known = Segments.tables, {}

    def kept(segments: Segments, device: torch.device) -> Any:
        if segments not in known:  # on a device they are made once; of no values they are not kept
            known[segments] = tables(segments, device)
        return known[segments]

    monkeypatch.setattr(Segments, "tables", kept)
    launched = []
    monkeypatch.setattr(noise, "_launch", lambda flat, *given: launched.append(flat))
    return launched


class Event:
    """Of a copy that has arrived."""

    def record(self, stream: Any) -> None:
        pass

    def query(self) -> bool:
        return False


@pytest.fixture
def copies(monkeypatch):
    """Copies to the host that are never looked at: they have no values. Nothing may wait for one."""
    from dpbench.engine import release

    begun = []

    def sent(flags):
        begun.append(flags)
        return flags.to("cpu", non_blocking=True), Event()

    monkeypatch.setattr(release, "sent", sent)
    return begun


def of_layers(count: int, dtype: torch.dtype, deviation: float) -> tuple[nn.Module, Any, PrivacyEngine]:
    model = nn.Sequential(*(nn.Linear(12, 12, device="cuda", dtype=dtype) for _ in range(count)))
    return attached(model, lr=0.1, batch_size=4, sample_size=100, noise_multiplier=deviation)


def launches(count: int, deviation: float, pieces: int = 1, dtype: torch.dtype = torch.float32) -> Counter[str]:
    """Of the engine's part of the second step: of one logical batch, in so many pieces."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        model, optimizer, engine = of_layers(count, dtype, deviation)
        counted = Launches()
        inner = engine._patch.inner_step

        @contextmanager
        def uncounted() -> Iterator[None]:
            before = counted.found.copy()
            yield
            counted.found = before

        def finished(losses: Tensor, drawn: Any) -> ClippedGradient:
            with uncounted():
                return ClippedGradient({n: torch.randn_like(p) for n, p in model.named_parameters()}, losses, losses)

        def stepped(noise: float) -> None:
            with uncounted():
                inner(noise)

        engine._recorder.finish, engine._patch.inner_step = finished, stepped
        for _ in range(2):
            counted.found.clear()
            for piece in range(pieces):
                with counted:
                    (optimizer.step if piece + 1 == pieces else optimizer.virtual_step)(loss=torch.zeros(4))
        assert all(p.grad is not None and p.grad.dtype == dtype and p.grad.shape == p.shape for p in model.parameters())
    return counted.found


@pytest.mark.parametrize(
    ("deviation", "pieces", "dtype"), [(1.0, 3, torch.float32), (1.0, 1, torch.bfloat16), (0.0, 3, torch.bfloat16)]
)
def test_a_step_takes_few_launches_however_many_parameters(deviation, pieces, dtype, triton, copies):
    few, many = (launches(layers, deviation, pieces, dtype) for layers in (5, 41))
    assert sum(many.values()) + len(triton) / 4 <= MOST, many
    assert {name for name in many if "foreach" not in name} == {name for name in few if "foreach" not in name}
    assert len(copies) == 4 and len(triton) == (4 if deviation else 0)


def test_waiting_for_a_value_is_found():
    with FakeTensorMode(), pytest.raises((AssertionError, RuntimeError)), Launches():
        bool(torch.zeros(3, device="cuda").isfinite().all())


@pytest.mark.gpu
@pytest.mark.parametrize("count", [5, 101])
def test_on_a_gpu_a_step_takes_as_few_and_waits_for_nothing(count):
    """By CUDA's own word: a synchronisation is an error, and the profiler counts."""
    model, optimizer, engine = of_layers(count, torch.float32, 1.0)
    grads = {name: torch.randn_like(p) for name, p in model.named_parameters()}
    losses = torch.zeros(4, device="cuda")
    engine._recorder.finish = lambda *given: ClippedGradient(dict(grads), losses, losses)
    engine._patch.inner_step = lambda noise: None
    for _ in range(3):
        optimizer.step(loss=losses)
        optimizer.zero_grad()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        torch.cuda.set_sync_debug_mode("error")
        try:
            optimizer.step(loss=losses)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        torch.cuda.synchronize()
    kernels_run = [event for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    assert 0 < len(kernels_run) <= MOST, [event.name for event in kernels_run]
    assert engine.privacy_spent().steps == 4
