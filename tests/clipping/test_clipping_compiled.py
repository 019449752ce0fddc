"""Compiled models are named, wherever the compiled part is, and however it was compiled."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from clipping.tape.compiled import compiled_code, compiled_modules


def layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))


def in_place(module: nn.Module) -> nn.Module:
    module.compile(backend="eager")
    return module


def with_a_part(compile_: Callable[[nn.Module], nn.Module]) -> nn.Module:
    model = layers()
    model[2] = compile_(model[2])
    return model


def whole(module: nn.Module) -> nn.Module:
    return torch.compile(module, backend="eager")  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("make", "name", "remedy"),
    [
        (lambda: whole(layers()), "Sequential", "_orig_mod"),
        (lambda: in_place(layers()), "Sequential", "without Module.compile"),
        (lambda: with_a_part(whole), "2", "_orig_mod"),
        (lambda: with_a_part(in_place), "2", "without Module.compile"),
    ],
    ids=["torch.compile", "Module.compile", "a part by torch.compile", "a part by Module.compile"],
)
def test_a_compiled_module_is_named_with_what_to_do(make: Callable[[], nn.Module], name: str, remedy: str):
    (problem,) = compiled_modules(make())
    assert problem.module == name and "is compiled" in problem.reason and remedy in problem.remedy


def test_nothing_compiled_is_no_problem():
    assert list(compiled_modules(layers())) == []
    assert list(compiled_modules(whole(layers())._orig_mod)) == []


def test_an_error_of_the_compiler_is_told_from_the_models_own():
    from torch._dynamo.exc import InternalTorchDynamoError

    problem = compiled_code(InternalTorchDynamoError("NameError: name\n 'x' is not defined"))
    assert problem is not None and "InternalTorchDynamoError: NameError: name 'x' is not defined" in problem.reason
    assert compiled_code(RuntimeError("shapes")) is None
