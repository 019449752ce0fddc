"""A step asks the device for nothing: proved without a GPU, on tensors that have no values.

Tensors on the meta device have shapes only. What would wait for a GPU cannot be done with them: a value that the host
reads (`item`, `bool`, `tolist`), a shape that depends on values (`nonzero`, an index by a boolean mask, `unique`), a
copy to the host. What goes through without an error is caught beside it: data of the host that are put on the device
(`torch.tensor(..., device=...)`, a copy, an index that lies on the CPU), which wait for the device's queue.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cases import CASES, FIFTEEN
from marks import slow_unless
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from clipping import Automatic, Flat, PerLayer, load_backend
from clipping.core.batches import map_tensors
from dpbench.models.loading import load_workload


class Waits(AssertionError):
    """What would wait for the device."""


class _Uploads(TorchFunctionMode):
    """Refuses tensors made of Python's numbers on a device: the data are copied there, which waits."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in (torch.tensor, torch.as_tensor, torch.Tensor.new_tensor) and result.device.type == "meta":
            raise Waits(f"{func.__name__}{args} puts data of the host on the device")
        return result


class _Copies(TorchDispatchMode):
    """Refuses operations on tensors of the host and of the device, unless the host's is a single number.

    (Of that the kernel is handed the value.)
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        read = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        made = [x for x in tree_leaves(result) if isinstance(x, Tensor)]
        operation = str(func)
        copied = "copy" in operation or "index" in operation
        devices = {x.device.type for x in (*read, *made) if x.dim() or copied}
        if len(devices) > 1:
            raise Waits(f"{operation} reads or writes tensors on {' and '.join(sorted(devices))}")
        return result


def on_device(tree: Any) -> Any:
    return map_tensors(lambda x: x.to("meta"), tree)


def step(backend: str, model: nn.Module, loss_fn: Any, inputs: Any, targets: Any, clip: Any = None) -> None:
    """One step on the device that has no values; raises for whatever would wait."""
    model, inputs, targets = model.to("meta"), on_device(inputs), on_device(targets)
    with load_backend(backend)(model, loss_fn, clip=clip or Flat(1.0), verify=False) as opened, _Uploads(), _Copies():
        out = opened(inputs, targets)
    assert out.norms is not None and out.norms.device.type == "meta"
    assert {name for name, p in model.named_parameters() if p.requires_grad} == set(out.grads)


VALUES = torch.empty(3, device="meta")
WAITING: dict[str, Callable[[Tensor], Any]] = {
    "item": lambda x: x.sum().item(),
    "bool": lambda x: bool((x > 0).all()),
    "float": lambda x: float(x[0]),
    "tolist": lambda x: x.tolist(),
    "to the host": lambda x: x.cpu(),
    "nonzero": lambda x: x.nonzero(),
    "where": lambda x: torch.where(x > 0),
    "mask": lambda x: x[x > 0],
    "masked_select": lambda x: x.masked_select(x > 0),
    "unique": lambda x: x.unique(),
    "repeats by values": lambda x: x.repeat_interleave(x.long()),
    "equal": lambda x: torch.equal(x, x),
    "torch.tensor": lambda x: x + torch.tensor([1.0, 2.0, 3.0], device=x.device),
    "one number": lambda x: x * torch.tensor(2.0, device=x.device),
    "new_tensor": lambda x: x.new_tensor([1.0]),
    "as_tensor": lambda x: torch.as_tensor([1], device=x.device),
    "to the device": lambda x: torch.zeros(3).to(x.device),
    "one number to the device": lambda x: torch.tensor(1.0).to(x.device),
    "copy_": lambda x: x.copy_(torch.zeros(3)),
    "index on the host": lambda x: x[torch.tensor([0, 1])],
}


def test_what_would_wait_is_found():
    for name in WAITING:
        with pytest.raises((Waits, RuntimeError, NotImplementedError)), _Uploads(), _Copies():
            WAITING[name](VALUES)


def test_what_does_not_wait_is_let_through():
    x = VALUES
    with _Uploads(), _Copies():
        torch.full_like(x, 3.0), torch.arange(3, device=x.device), torch.zeros((), device=x.device), x.new_zeros(2)
        x * torch.tensor(2.0), x.masked_fill(x > 0, 0.0), x.repeat_interleave(2), x[1:], x.gather(0, x.long())


def test_a_loss_that_reads_values_is_found():
    def loss_fn(outputs: Tensor, targets: Tensor) -> Tensor:
        losses = F.cross_entropy(outputs, targets, reduction="none")
        return losses if losses.mean() < 100 else losses.clamp(max=100)

    with pytest.raises(RuntimeError, match="meta"):
        step("bk_mixed", nn.Linear(3, 4), loss_fn, torch.randn(5, 3), torch.zeros(5, dtype=torch.int64))


class Block(nn.Module):
    """A transformer's block, causal."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mixed, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(2, (self.heads, -1)).transpose(1, 2) for y in self.mixed(self.first(x)).chunk(3, dim=2))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.second(x))))


class Language(nn.Module):
    """Like GPT-2: tokens and positions, two blocks, a head that is the embedding."""

    def __init__(self, vocabulary: int = 300, width: int = 32, length: int = 40, tied: bool = True) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width, padding_idx=0), nn.Embedding(length, width)
        self.blocks = nn.Sequential(Block(width, 4), Block(width, 4))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        return self.head(self.norm(self.blocks(x)))


def language(tied: bool) -> tuple[nn.Module, Any, Tensor, Tensor]:
    ids = torch.randint(0, 300, (3, 40))
    model = Language(tied=tied)
    return model, lambda out, y: F.cross_entropy(out.transpose(1, 2), y, reduction="none").sum(1), ids, ids


def of_workload(reference: str, batch_size: int, **options: Any) -> tuple[nn.Module, Any, Any, Any]:
    workload = load_workload(reference, data="synthetic", **options)
    return workload.model, workload.loss_fn, *workload.batch(batch_size)


# transformers' own gpt2 and llama read a value in their forward pass, in ordinary training as well: a model of our own
MODELS: dict[str, Callable[[], tuple[nn.Module, Any, Any, Any]]] = {
    "cnn": lambda: of_workload("cnn", 6),
    "resnet18": lambda: of_workload("resnet18", 3),
    "resnet18 in bfloat16": lambda: of_workload("resnet18", 3, dtype="bfloat16"),
    "vgg11": lambda: of_workload("vgg11", 3),
    "vision transformer": lambda: of_workload("timm:vit_tiny_patch16_224", 3),
    "language, tied": lambda: language(tied=True),
    "language, long": lambda: language(tied=False),
    "bert": lambda: of_workload("transformers:bert@16", 2),
}


@pytest.mark.parametrize(
    ("name", "backend"),
    slow_unless(
        lambda name, backend: name not in ("bert", "vgg11") and (backend == "bk_mixed" or name.startswith("language")),
        product(MODELS, ("bk_mixed", "bk_ghost")),
    ),
)
def test_a_step_waits_for_nothing(name: str, backend: str):
    model, loss_fn, inputs, targets = MODELS[name]()
    step(backend, model, loss_fn, inputs, targets)


KNOWN = {
    "bags of different sizes": "int(lengths.max()), the longest bag: bags of different sizes are padded to it",
}
"""Cases that wait, and where. Strict: one that no longer does must be taken out."""


def test_every_rule_waits_for_nothing():
    """The conformance cases: every operation that has a rule, and the fallback."""
    waits = {}
    for case in CASES:
        torch.manual_seed(0)
        model, inputs, targets, loss_fn = case.make()
        try:
            for backend in ("bk_mixed", "bk_ghost") if case.name in FIFTEEN else ("bk_mixed",):
                step(backend, model, loss_fn, inputs, targets)
        except (Waits, RuntimeError, NotImplementedError) as error:
            waits[case.name] = repr(error)
    assert waits.keys() == KNOWN.keys(), waits


@pytest.mark.parametrize("clip", [Automatic(1.0), PerLayer(1.0), PerLayer(0.0), Flat(float("inf"))], ids=repr)
def test_no_clipping_function_waits(clip: Any):
    step("bk_mixed", *of_workload("cnn", 4), clip=clip)
    step("bk_ghost", *language(tied=True), clip=clip)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device: none here")
@pytest.mark.parametrize("backend", ("bk_mixed", "bk_ghost"))
@pytest.mark.parametrize("name", MODELS)
def test_a_step_waits_for_nothing_on_a_gpu(name: str, backend: str):
    """The same by CUDA's own word: after the first steps, which compile and choose, a synchronisation is an error."""
    model, loss_fn, inputs, targets = MODELS[name]()
    model, inputs, targets = model.cuda(), *map_tensors(lambda x: x.cuda(), (inputs, targets))
    with load_backend(backend)(model, loss_fn, verify=False) as opened:
        for _ in range(3):
            opened(inputs, targets)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            opened(inputs, targets)
        finally:
            torch.cuda.set_sync_debug_mode("default")
