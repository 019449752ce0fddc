"""The parameters of a model, which every step asks for."""

from __future__ import annotations

from torch import nn


def named_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """`dict(model.named_parameters())` in one walk, for a step of a small model: it takes half the time.

    (torch's own generators hand each name up through every module that is around it.)

    Args:
        model: any module; one whose class has a `named_parameters` of its own is asked for them.
    """
    if type(model).named_parameters is not nn.Module.named_parameters:
        return dict(model.named_parameters())
    found: dict[str, nn.Parameter] = {}
    seen: set[object] = set()

    def walk(module: nn.Module, prefix: str) -> None:
        seen.add(module)
        if module._parameters:  # most modules have none, and most have no module within
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
