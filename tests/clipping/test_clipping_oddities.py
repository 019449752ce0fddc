"""Odd things that models do with their parameters: each exact, or refused by name, without verification as with it."""

from __future__ import annotations

import pytest
import torch
from marks import name_of
from oddities import EXACT, REFUSED, B, Case, Odd
from torch import Tensor, nn

from clipping import Flat, UnsupportedModel, compare, load_backend
from clipping.core.reference import definition

BACKENDS = ("ghost", "bk_mixed", "fastgradclip")
CLIP = Flat(max_grad_norm=0.5)


def squared_error(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs.flatten(1) - targets[:, None]).square().mean(1)


def made(case: Case) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    model = Odd(case.forward, **case.parts()).double()
    return model, torch.randn(B, *case.shape, dtype=torch.float64), torch.randn(B, dtype=torch.float64)


@pytest.mark.parametrize("case", EXACT, ids=name_of)
def test_exact(case: Case):
    model, x, y = made(case)
    expected = definition(model, squared_error, x, y, clip=CLIP)
    assert expected.norms is not None and expected.norms.min() > CLIP.max_grad_norm / 100
    assert any(g.any() for g in expected.grads.values())
    for backend in BACKENDS:
        with load_backend(backend)(model, squared_error, clip=CLIP, verify=backend == "bk_mixed") as b:
            assert compare(b(x, y), expected).within(1e-9), backend


def test_refused_by_name():
    for case, said in REFUSED:
        model, x, y = made(case)
        for backend in BACKENDS:
            with (
                pytest.raises(UnsupportedModel, match=said) as error,
                load_backend(backend)(model, squared_error, clip=CLIP, verify=False) as b,
            ):
                b(x, y)
            assert "remedy: " in str(error.value) and "\n" not in str(error.value)
