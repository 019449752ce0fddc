"""Trains by users' loops on a CUDA device and on the CPU, and compares: python fake_loops.py NAME.

The device is the fake of `fake_cuda.py`, or a real one. Without noise, in float64 and from one seed, the weights on
both devices are equal up to rounding. Errors have one line.
"""

import os
import sys
import tempfile
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from clipping.checks import sample_independence
from clipping.program import graphs
from clipping.rules.linear import LinearWeight, addmm, linear, matmul
from dpbench import Misuse, PrivacyEngine
from dpbench.conformance.cases import cross_entropy as loss

DEVICES = ("cuda", "cpu")
KNOWN = {"batch_size": 12, "sample_size": 60, "max_grad_norm": 0.3, "steps": 10, "noise_multiplier": 0.0}


def net(dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    layers = (nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 5), nn.ReLU())
    return nn.Sequential(*layers, nn.Linear(5, 3)).to(dtype)


def data(dtype: torch.dtype = torch.float64) -> TensorDataset:
    numbers = torch.Generator().manual_seed(1)
    x = torch.randn(60, 1, 6, 6, generator=numbers, dtype=torch.float64).to(dtype)
    return TensorDataset(x, torch.randint(0, 3, (60,), generator=numbers))


def engine_of(model: nn.Module, **more: Any) -> PrivacyEngine:
    return PrivacyEngine(model, generator=torch.Generator().manual_seed(3), **{**KNOWN, **more})


def on_both(train: Callable[[str], nn.Module], tolerance: float = 1e-9) -> None:
    """Check that `train(device)` gives the same weights on both devices, and changes them."""
    found = {device: [p.detach() for p in train(device).parameters()] for device in DEVICES}
    assert all(p.is_cuda for p in found["cuda"])
    for p, q in zip(found["cuda"], found["cpu"], strict=True):
        torch.testing.assert_close(p.cpu(), q, rtol=0, atol=tolerance)
    begun = net().parameters()
    if len(found["cpu"]) == len(list(net().parameters())):
        assert any(float((p - q).abs().max()) > 1e-3 for p, q in zip(found["cpu"], begun, strict=True))


def refused(run: Callable[[], object], *words: str, kind: type[Exception] = ValueError) -> None:
    """Check that `run` raises an error of one line with these words."""
    try:
        run()
    except kind as error:
        said = str(error)
    else:
        raise AssertionError("it was not refused")
    assert "\n" not in said and all(word in said for word in words), said


def step(**more: Any) -> Callable[[str], nn.Module]:
    def train(device: str) -> nn.Module:
        model = net().to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
        engine = PrivacyEngine(model, **{**KNOWN, **more}) if "noise" in more else engine_of(model, **more)
        engine.attach(optimizer)
        for x, y in engine.data_loader(data()):
            optimizer.step(loss=loss(model(x.to(device)), y.to(device)))
        return model

    return train


def steps() -> None:
    on_both(step())
    for noise in ("gaussian", "discrete"):  # noise drawn on the device is finite
        model = step(noise_multiplier=1.0, noise=noise)("cuda")
        assert all(bool(p.isfinite().all()) for p in model.parameters())


def virtual() -> None:
    """The caller's own batches, each in three parts."""

    def train(device: str) -> nn.Module:
        model = net().to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        engine = engine_of(model, sampling="shuffled")
        engine.attach(optimizer)
        for batch in zip(*(x.split(12) for x in data().tensors), strict=True):
            *parts, last = zip(*(x.to(device).split(4) for x in batch), strict=True)
            for x, y in parts:
                optimizer.virtual_step(loss=loss(model(x), y))  # type: ignore[attr-defined]
            optimizer.step(loss=loss(model(last[0]), last[1]))
        assert engine.steps == 5
        state = engine.state_dict()
        engine.detach()
        engine_of(model, sampling="shuffled").load_state_dict(state)
        return model

    on_both(train)


def settled(loss_fn: Callable[[Tensor, Tensor], Tensor], compile: Any) -> str:
    """How a whole step runs once it is planned and captured; in it a synchronisation is an error."""
    model = net(torch.float32).cuda()
    engine = PrivacyEngine(model, **{**KNOWN, "batch_size": 8, "noise_multiplier": 1.0})
    engine.timing = False  # the graph is replayed whatever it takes
    engine.attach(torch.optim.AdamW(model.parameters(), foreach=True))
    run = engine.make_step(loss_fn, compile=compile)
    x, y = (each[:8].cuda() for each in data(torch.float32).tensors)
    for _ in range(7):
        run(x, y)
    torch.cuda.set_sync_debug_mode("error")
    try:
        run(x, y)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert engine.privacy_spent().steps == 8
    return "eager" if run.graphs is None else run.graphs.way


def whole() -> None:
    """Steps from `make_step`; settled, they read nothing back. Rare checks of samples and code do, and are off."""

    def train(device: str) -> nn.Module:
        model = net().to(device)
        engine = engine_of(model)
        engine.attach(torch.optim.SGD(model.parameters(), lr=0.5))
        run = engine.make_step(loss, compile=False)
        for x, y in engine.data_loader(data()):
            run(x.to(device), y.to(device))
        return model

    def reads(outputs: Tensor, targets: Tensor) -> Tensor:
        losses = loss(outputs, targets)
        losses.detach().sum().item()
        return losses

    def scaled(outputs: Tensor, targets: Tensor) -> Tensor:
        return loss(outputs, targets) * torch.tensor(0.5, device=outputs.device)

    def rising(outputs: Tensor, targets: Tensor) -> Tensor:
        return loss(outputs, targets) * scale.add_(0.1)  # the host's, which a CUDA graph would not read again

    scale = torch.ones(())
    on_both(train)
    graphs.RATE = sample_independence.RATE = 0.0
    sample_independence.Occasions._is_early = lambda *_: False  # type: ignore[method-assign]
    assert [settled(loss, "auto"), settled(loss, False)] == ["replayed", "eager"]
    assert [settled(scaled, True), settled(rising, True)] == ["replayed", "traced"]
    refused(lambda: settled(reads, False), "synchronizing", kind=RuntimeError)


def amp() -> None:
    """The older names of torch.cuda.amp work; a scaler is refused."""
    model = net(torch.float32).to("cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    engine = engine_of(model)
    engine.attach(optimizer)
    for autocast in (torch.cuda.amp.autocast(dtype=torch.bfloat16), torch.autocast("cuda", torch.bfloat16)):
        for x, y in engine.data_loader(data(torch.float32)):
            with autocast:
                outputs = model(x.cuda())
                losses = loss(outputs, y.cuda())
            assert outputs.dtype == torch.bfloat16
            optimizer.step(loss=losses)
        assert all(p.dtype == torch.float32 and bool(p.isfinite().all()) for p in model.parameters())
    scaler = torch.cuda.amp.GradScaler()
    losses = scaler.scale(loss(model(x.cuda()), y.cuda()))
    refused(lambda: scaler.step(optimizer, loss=losses), "GradScaler", kind=Misuse)


def trainer() -> None:
    from test_huggingface import trainer_of
    from tiny import model_of

    def train(device: str, dtype: torch.dtype = torch.float64, **more: Any) -> nn.Module:
        pieces = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
        pieces |= {"use_cpu": device == "cpu", "save_strategy": "steps", "save_steps": 3}
        with tempfile.TemporaryDirectory() as folder:
            own = trainer_of(folder, "bert", model=model_of("bert", dtype), **pieces, **more)
            own.train()
        assert own.engine.steps == 6
        return own.model

    on_both(train, 1e-5)  # the CPU's fused attention has errors of 1e-6
    assert all(bool(p.isfinite().all()) for p in train("cuda", torch.float32, bf16=True).parameters())


def lightning() -> None:
    from test_lightning import Split, fit, strategy_of

    def train(accelerator: str, strategy: Any, dtype: torch.dtype = torch.float64, **more: Any) -> nn.Module:
        module = Split()
        *body, module.head = net(dtype)
        module.body = nn.Sequential(*body)
        own, _ = fit(strategy, module, loader=DataLoader(data(dtype), 4, True), accelerator=accelerator, **more)
        assert own.global_step == strategy.engine.steps == 10
        return module.to(strategy.root_device)  # Lightning moved it off the device

    on_both(lambda device: train({"cuda": "gpu", "cpu": "cpu"}[device], strategy_of(), devices=1))
    on_both(lambda device: train("auto", strategy_of(options={"device": device})))
    for mixed in ("bf16-mixed", "bf16-true"):
        found = train("gpu", strategy_of(), torch.float32, devices=1, precision=mixed)
        assert all(bool(p.isfinite().all()) for p in found.parameters()), mixed
    two = [torch.device("cuda", i) for i in (0, 1)]
    refused(lambda: setattr(strategy_of(), "parallel_devices", two), "devices=1", "PrivateDDPStrategy")
    half = {"devices": 1, "precision": "16-mixed"}
    refused(lambda: train("gpu", strategy_of(), torch.float32, **half), "bf16-mixed", "16-mixed")


def opacus() -> None:
    from opacus_made import Made

    def train(device: str, mode: str = "hooks") -> nn.Module:
        model, sgd = net().to(device), partial(torch.optim.SGD, lr=0.5)
        options = {"poisson_sampling": False, "grad_sample_mode": mode, "max_grad_norm": 0.3, "noise_multiplier": 0.0}
        options |= {"criterion": nn.CrossEntropyLoss()} if mode == "ghost" else {}
        numbers = torch.Generator(device).manual_seed(3)
        made = Made(model, data(), batch_size=12, optimizer=sgd, noise_generator=numbers, **options)
        made.train(loader=((x.to(device), y.to(device)) for x, y in made.loader))
        return model

    on_both(train)
    on_both(lambda device: train(device, "ghost"))


def device() -> None:
    """What the fake has to find."""
    x = torch.ones(3, device="cuda")
    refused(lambda: x + torch.ones(3), "at least two devices", kind=RuntimeError)
    refused(lambda: net(torch.float32).cuda()(torch.ones(4, 1, 6, 6)), "at least two devices", kind=RuntimeError)
    cpu = torch.Generator()
    refused(lambda: torch.randn(3, device="cuda", generator=cpu), "for generator", kind=RuntimeError)
    before, card = torch.cuda.memory_allocated(), torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((before + 2**20) / card)
    refused(lambda: torch.empty(2**20, device="cuda"), "CUDA out of memory", kind=torch.OutOfMemoryError)
    torch.cuda.set_per_process_memory_fraction(1.0)
    child = os.fork()
    if child == 0:
        refused(lambda: torch.ones(1, device="cuda"), "forked subprocess", kind=RuntimeError)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0


def casts() -> None:
    """What a linear layer's rule holds under autocast is what autograd holds: norm and sum cast nothing."""
    for handler in (linear, lambda x, w, b: addmm(b, x, w.t()), lambda x, w, b: matmul(x, w.t())):
        x, w, b = (torch.randn(*shape, device="cuda", requires_grad=True) for shape in ((4, 6), (5, 6), (5,)))
        for autocast, dtype in ((True, torch.bfloat16), (False, torch.float32)):
            with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
                output, gradients = handler(x, w, b)
            held = next(x for _, kind, x, *_ in gradients if kind is LinearWeight)
            node = output.grad_fn
            saved = node._saved_mat1 if hasattr(node, "_saved_mat1") else node._saved_self  # type: ignore[union-attr]
            assert held.dtype == output.dtype == dtype and held.data_ptr() == saved.data_ptr()


NAMES: dict[str, Callable[[], None]] = {
    each.__name__: each for each in (device, casts, steps, virtual, whole, amp, trainer, lightning, opacus)
}


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    NAMES[sys.argv[1]]()
    print("as a CPU's")
