"""Odd things that models do with their parameters: each exact, or refused by name, without verification as with it."""

from __future__ import annotations

import pytest
import torch
from marks import name_of, slow_unless
from oddities import EXACT, REFUSED, B, Case, Odd
from torch import Tensor, nn
from written import WRITTEN

from clipping import Flat, UnsupportedModel, load_backend
from clipping.core.reference import definition

BACKENDS = ("ghost", "bk_mixed", "fastgradclip")
CLIP = Flat(max_grad_norm=0.5)


def squared_error(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs.flatten(1) - targets[:, None]).square().mean(1)


def made(case: Case) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    model = Odd(case.forward, **case.parts()).double()
    return model, torch.randn(B, *case.shape, dtype=torch.float64), torch.randn(B, dtype=torch.float64)


def assert_exact(backend: str, case: Case, verify: bool = False) -> None:
    model, x, y = made(case)
    expected = definition(model, squared_error, x, y, clip=CLIP)
    with load_backend(backend)(model, squared_error, clip=CLIP, verify=verify) as b:
        out = b(x, y)
    assert expected.norms is not None and expected.norms.min() > CLIP.max_grad_norm / 100
    torch.testing.assert_close(out.norms, expected.norms, rtol=1e-10, atol=1e-12)
    assert any(g.any() for g in expected.grads.values())
    for name, g in expected.grads.items():
        torch.testing.assert_close(out.grads[name], g, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", [*EXACT, *WRITTEN], ids=lambda case: case.name)
def test_exact(case: Case, backend: str):
    assert_exact(backend, case)


THIRD = [*EXACT, *WRITTEN][::3]


@pytest.mark.parametrize("case", slow_unless(lambda case: case in THIRD, [*EXACT, *WRITTEN]), ids=name_of)
def test_exact_with_verification(case: Case):
    """It looks at outputs and gradients, and not at how they came to be: a third of them shows it."""
    assert_exact("bk_mixed", case, verify=True)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("case", "said"), REFUSED, ids=lambda v: v.name if isinstance(v, Case) else "")
def test_refused_by_name(case: Case, said: str, backend: str):
    model, x, y = made(case)
    with (
        pytest.raises(UnsupportedModel, match=said) as error,
        load_backend(backend)(model, squared_error, clip=CLIP, verify=False) as b,
    ):
        b(x, y)
    assert "remedy: " in str(error.value) and "\n" not in str(error.value)
