"""A step asks the device for nothing: proved without a GPU, on tensors that have no values.

Tensors on the meta device have shapes only. What would wait for a GPU cannot be done with them: a value that the host
reads (`item`, `bool`, `tolist`), a shape that depends on values (`nonzero`, an index by a boolean mask, `unique`), a
copy to the host. What goes through without an error is caught beside it: data of the host that are put on the device
(`torch.tensor(..., device=...)`, a copy, an index that lies on the CPU), which wait for the device's queue.
"""

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cases import FIFTEEN
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from clipping import Automatic, Flat, PerLayer, load_backend
from clipping.core.batches import map_tensors
from dpbench.conformance.cases import CASES
from dpbench.conformance.modules import Net
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
    "to the host": lambda x: x.cpu(),
    "mask": lambda x: x[x > 0],
    "repeats by values": lambda x: x.repeat_interleave(x.long()),
    "torch.tensor": lambda x: x * torch.tensor(2.0, device=x.device),
    "new_tensor": lambda x: x.new_tensor([1.0]),
    "copy_": lambda x: x.copy_(torch.zeros(3)),
    "index on the host": lambda x: x[torch.tensor([0, 1])],
}


def test_what_would_wait_is_found():
    for name in WAITING:
        with pytest.raises((Waits, RuntimeError, NotImplementedError)), _Uploads(), _Copies():
            WAITING[name](VALUES)


def language(tied: bool) -> tuple[nn.Module, Any, Tensor, Tensor]:
    """Like GPT-2: tokens and positions, two causal blocks, a head that may be the embedding."""

    def forward(net: Any, ids: Tensor) -> Tensor:
        x = net.tokens(ids) + net.positions(torch.arange(ids.shape[1], device=ids.device))
        mask = torch.full((40, 40), -torch.inf, device=ids.device).triu(1)
        return net.head(net.blocks(x, mask, is_causal=True))

    ids = torch.randint(0, 300, (3, 40))
    tables = {"tokens": nn.Embedding(300, 32, 0), "positions": nn.Embedding(40, 32)}
    block = nn.TransformerEncoderLayer(32, 4, 128, 0.0, batch_first=True, norm_first=True)
    blocks = nn.TransformerEncoder(block, 2, enable_nested_tensor=False)
    model = Net(forward, **tables, blocks=blocks, head=nn.Linear(32, 300, bias=False))
    if tied:
        model.head.weight = model.tokens.weight
    return model, lambda out, y: F.cross_entropy(out.transpose(1, 2), y, reduction="none").sum(1), ids, ids


def of_workload(reference: str, batch_size: int, **options: Any) -> tuple[nn.Module, Any, Any, Any]:
    workload = load_workload(reference, data="synthetic", **options)
    return workload.model, workload.loss_fn, *workload.batch(batch_size)


# transformers' own gpt2 and llama read a value in their forward pass, in ordinary training as well: a model of our own
MODELS: dict[str, Callable[[], tuple[nn.Module, Any, Any, Any]]] = {
    "cnn": lambda: of_workload("cnn", 6),
    "resnet18": lambda: of_workload("resnet18", 3),
    "resnet18 in bfloat16": lambda: of_workload("resnet18", 3, dtype="bfloat16"),
    "vision transformer": lambda: of_workload("timm:vit_tiny_patch16_224", 3),
    "language, tied": lambda: language(tied=True),
    "language, long": lambda: language(tied=False),
}


@pytest.mark.parametrize(("name", "backend"), [*product(MODELS, ["bk_mixed"]), ("language, tied", "bk_ghost")])
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
@pytest.mark.parametrize("compile", [False, "auto"])
@pytest.mark.parametrize("backend", ("bk_mixed", "bk_ghost"))
@pytest.mark.parametrize("name", MODELS)
def test_a_step_waits_for_nothing_on_a_gpu(name: str, backend: str, compile: Any):
    """The same by CUDA's own word: after the first steps, which compile and choose, a synchronisation is an error."""
    model, loss_fn, inputs, targets = MODELS[name]()
    model, inputs, targets = model.cuda(), *map_tensors(lambda x: x.cuda(), (inputs, targets))
    with load_backend(backend)(model, loss_fn, verify=False, compile=compile) as opened:
        if opened.graphs is not None:
            opened.graphs._timing = False  # replayed: TorchInductor takes a minute
        for _ in range(5):  # the second step of a graph is compared with an eager one
            opened(inputs, targets)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            opened(inputs, targets)
        finally:
            torch.cuda.set_sync_debug_mode("default")
