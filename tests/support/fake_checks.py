"""Checks of the fake device of `fake_cuda.py`: run python fake_checks.py in a process that has it."""

from __future__ import annotations

import copy
import io
import os
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from clipping.rules.linear import LinearWeight, addmm, linear, matmul


def raises(kind: type[BaseException], words: str, run: Callable[[], object]) -> None:
    try:
        run()
    except kind as error:
        assert words in str(error), error
    else:
        raise AssertionError(f"expected an error that says {words!r}")


def model() -> nn.Module:
    torch.manual_seed(0)
    layers = (nn.Conv2d(1, 2, 3, padding=1), nn.GroupNorm(1, 2), nn.Flatten(), nn.Linear(32, 3))
    return nn.Sequential(*layers)


def trains_as_a_cpu() -> None:
    found = []
    for device in ("cuda", "cpu"):
        net, x, y = model().to(device), torch.ones(4, 1, 4, 4).to(device), torch.tensor([0, 1, 2, 0]).to(device)
        optimizer = torch.optim.AdamW(net.parameters())
        F.cross_entropy(net(x), y).backward()
        optimizer.step()
        assert {(p.device.type, p.grad.device.type) for p in net.parameters() if p.grad is not None} == {(device,) * 2}
        found.append([p.detach().cpu() for p in net.parameters()])
    for p, q in zip(*found, strict=True):
        torch.testing.assert_close(p, q)


def devices_do_not_mix() -> None:
    x = torch.ones(3, device="cuda")
    raises(RuntimeError, "at least two devices", lambda: x + torch.ones(3))
    raises(RuntimeError, "at least two devices", lambda: model().cuda()(torch.ones(4, 1, 4, 4)))
    raises(RuntimeError, "for generator", lambda: torch.randn(3, device="cuda", generator=torch.Generator()))
    raises(TypeError, "numpy", lambda: x.numpy())
    assert (x + torch.tensor(1.0)).is_cuda and x.to("cuda") is x and x.cpu().device.type == "cpu"
    assert torch.Generator("cuda").device == x.device and isinstance(torch.default_generator, torch.Generator)


def memory_is_counted_and_ends() -> None:
    before = torch.cuda.memory_allocated()
    x = torch.empty(2**20, device="cuda")
    assert torch.cuda.memory_allocated() == before + 2**22
    del x
    assert torch.cuda.memory_allocated() == before and torch.cuda.max_memory_allocated() >= before + 2**22
    torch.cuda.set_per_process_memory_fraction((before + 2**20) / torch.cuda.get_device_properties(0).total_memory)
    raises(torch.OutOfMemoryError, "CUDA out of memory", lambda: torch.empty(2**20, device="cuda"))
    torch.cuda.set_per_process_memory_fraction(1.0)


def generators_are_its_own() -> None:
    cpu = torch.get_rng_state()
    torch.cuda.manual_seed(3)
    first = torch.rand(5, device="cuda")
    torch.cuda.manual_seed(3)
    assert torch.equal(first, torch.rand(5, device="cuda")) and torch.equal(cpu, torch.get_rng_state())


def is_copied_saved_and_transformed() -> None:
    net, file = model().cuda(), io.BytesIO()
    assert copy.deepcopy(net)[0].weight.is_cuda  # type: ignore[index]
    torch.save(net.state_dict(), file)
    for where, device in ((None, "cuda"), ("cpu", "cpu")):
        file.seek(0)
        assert torch.load(file, map_location=where)["0.weight"].device.type == device
    of_each = torch.func.vmap(torch.func.grad(lambda w, x: (w * x).sum().sin()), (None, 0))
    assert of_each(torch.ones(3, device="cuda"), torch.ones(2, 3, device="cuda")).is_cuda
    with torch.autocast("cuda", torch.bfloat16):
        assert net(torch.ones(2, 1, 4, 4, device="cuda")).dtype == torch.bfloat16


def autocast_casts_an_input_once() -> None:
    """What a linear layer's rule holds is what autograd holds: norm and sum cast nothing."""
    for handler in (linear, lambda x, w, b: addmm(b, x, w.t()), lambda x, w, b: matmul(x, w.t())):
        x, w, b = (torch.randn(*shape, device="cuda", requires_grad=True) for shape in ((4, 6), (5, 6), (5,)))
        for autocast, dtype in ((True, torch.bfloat16), (False, torch.float32)):
            with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
                output, gradients = handler(x, w, b)
            held = next(x for _, kind, x, *_ in gradients if kind is LinearWeight)
            node = output.grad_fn
            saved = node._saved_mat1 if hasattr(node, "_saved_mat1") else node._saved_self  # type: ignore[union-attr]
            assert held.dtype == output.dtype == dtype and held.data_ptr() == saved.data_ptr()


def waits_are_told() -> None:
    x = torch.ones(3, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        raises(RuntimeError, "synchronizing", lambda: float(x.sum()))
    finally:
        torch.cuda.set_sync_debug_mode("default")


def is_not_taken_twice() -> None:
    child = os.fork()
    if child == 0:
        raises(RuntimeError, "forked subprocess", lambda: torch.ones(1, device="cuda"))
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0


if __name__ == "__main__":
    trains_as_a_cpu()
    devices_do_not_mix()
    memory_is_counted_and_ends()
    generators_are_its_own()
    is_copied_saved_and_transformed()
    autocast_casts_an_input_once()
    waits_are_told()
    is_not_taken_twice()
    print("a device")
