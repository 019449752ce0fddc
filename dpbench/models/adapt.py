"""Changes models so that each sample has its own gradient, and every backend sees the same function.

- BatchNorm makes one sample's loss depend on the others, so a per-sample gradient does not exist. GroupNorm replaces it
  (as De et al. 2022, arXiv:2204.13650, and every DP-SGD library recommend), also in ordinary training, for a fair
  comparison.
- Dropout draws a mask in each forward pass. Backends differ in the number and order of passes, so their gradients could
  not be compared. With probability 0 it costs nothing and draws nothing.
"""

from collections.abc import Callable

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily

from dpbench.models.workload import ModelError

MAX_GROUPS = 32  # Wu & He 2018, arXiv:1803.08494


def group_norm(channels: int) -> nn.GroupNorm:
    """GroupNorm in min(32, channels) groups, for the built-in models.

    Args:
        channels: of its input.

    Raises:
        ValueError: channels is above 32 and no multiple of it.
    """
    return nn.GroupNorm(min(MAX_GROUPS, channels), channels)


def replace_batch_norm(model: nn.Module) -> nn.Module:
    """Replace every BatchNorm by a GroupNorm, in place; returns the model, which is new if it was a BatchNorm itself.

    The groups are the largest divisor of the channels that is at most 32. BatchNorm1d becomes one group, since on
    [B, C] a group of one channel would turn every value into zero. The affine parameters have the old shapes and start
    at 1 and 0, never at the old values: a BatchNorm that starts at zero, as the last one of a residual branch often
    does, gives that branch zero gradients, which no check could find wrong. A subclass that includes dropout and
    activation (timm's BatchNormAct2d) keeps both. A module used twice stays one module.
    """
    modules = list(model.modules())
    new = {id(old): _as_group_norm(old) for old in modules if isinstance(old, nn.modules.batchnorm._BatchNorm)}
    for module in modules:
        module._modules.update({name: new[id(old)] for name, old in module._modules.items() if id(old) in new})
    return new.get(id(model), model)


def _as_group_norm(old: nn.modules.batchnorm._BatchNorm) -> nn.Module:
    channels = old.num_features
    groups = max(g for g in range(1, min(MAX_GROUPS, channels) + 1) if channels % g == 0)
    if isinstance(old, nn.BatchNorm1d):
        groups = 1
    norm = nn.GroupNorm(groups, channels, eps=old.eps, affine=old.affine)
    if old.affine and old.weight is not None:
        norm.to(device=old.weight.device, dtype=old.weight.dtype)
        norm.weight.requires_grad_(old.weight.requires_grad)
        norm.bias.requires_grad_(old.bias.requires_grad)
    then = [getattr(old, name) for name in ("drop", "act") if isinstance(getattr(old, name, None), nn.Module)]
    new = nn.Sequential(norm, *then) if then else norm
    return new.train(old.training)


def _remove_dropout(model: nn.Module) -> None:
    """Set the probability of every dropout and stochastic-depth module to 0, in place.

    Handles torch's Dropout* and MultiheadAttention, and modules of timm, torchvision and transformers with F.dropout.
    """
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd) or type(module).__name__ == "StochasticDepth":
            module.p = 0.0  # type: ignore[assignment]
        for name in ("dropout", "attention_dropout", "attn_drop_p", "drop_prob", "drop_rate"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)


def adapt(model: nn.Module) -> nn.Module:
    """Apply both changes, and set train mode, for all referenced models; the built-in ones need no change.

    Raises:
        ModelError: a lazy module, with parameters that do not exist yet.
    """
    lazy = [name for name, p in model.named_parameters() if isinstance(p, nn.UninitializedParameter)]
    if lazy:
        raise ModelError("a model whose parameters have shapes", f"{lazy[0]}, which is not initialised")
    model = replace_batch_norm(model)
    _remove_dropout(model)
    return model.train()


def to_fake(model: nn.Module, mode: object) -> nn.Module:
    """Replace every real parameter and buffer by its fake counterpart, in place, if `mode` is a FakeTensorMode.

    For models that need real tensors to build even under FakeTensorMode: constructors of timm and others read values
    (`torch.linspace(...).tolist()`), which fake tensors lack.

    Args:
        mode: the fake mode suspended for building, or None.
    """
    if isinstance(mode, FakeTensorMode):
        with unset_fake_temporarily():
            _exchange(model, mode.from_tensor)
    return model


def place(model: nn.Module, device: str, dtype: torch.dtype) -> nn.Module:
    """model.to(device, dtype) that also works for fake tensors (torch's own cannot change their device)."""
    if not any(isinstance(p, FakeTensor) for p in model.parameters()):
        return model.to(device, dtype)
    _exchange(model, lambda x: moved(x, device, dtype))
    return model


def moved(x: torch.Tensor, device: str, dtype: torch.dtype) -> torch.Tensor:
    """A tensor on `device`, in `dtype` if it is of floating point.

    Args:
        x: any tensor.
    """
    return x.to(device, dtype if x.is_floating_point() else x.dtype)


def _exchange(model: nn.Module, convert: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Replace every parameter and buffer by convert(tensor); shared tensors stay shared."""
    new: dict[int, torch.Tensor] = {}
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, old in tensors.items():
                if old is None:
                    continue
                if id(old) not in new:
                    with torch.no_grad():
                        value = convert(old.detach())
                    new[id(old)] = nn.Parameter(value, old.requires_grad) if isinstance(old, nn.Parameter) else value
                tensors[name] = new[id(old)]  # type: ignore[assignment]
