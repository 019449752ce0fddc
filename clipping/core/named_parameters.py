"""A fast `model.named_parameters()` for every step."""

from __future__ import annotations

from torch import nn


def named_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """`dict(model.named_parameters())` in one walk.

    torch's nested generators pass each name through every enclosing module, which costs a small model's step time.

    Args:
        model: any module. If its class overrides `named_parameters`, the override is called.
    """
    if type(model).named_parameters is not nn.Module.named_parameters:
        return dict(model.named_parameters())
    found: dict[str, nn.Parameter] = {}
    seen: set[object] = set()

    def walk(module: nn.Module, prefix: str) -> None:
        seen.add(module)
        if module._parameters:  # most modules have no parameters, and most have no children
            for name, p in module._parameters.items():
                if p is not None and id(p) not in seen:
                    seen.add(id(p))
                    found[prefix + name] = p
        if module._modules:
            for name, child in module._modules.items():
                if child is not None and child not in seen:
                    walk(child, f"{prefix}{name}.")

    walk(model, "")
    return found
