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


def require_exact(case: Case, *backends: str, verify: bool = False) -> None:
    model, x, y = made(case)
    expected = definition(model, squared_error, x, y, clip=CLIP)
    assert expected.norms is not None and expected.norms.min() > CLIP.max_grad_norm / 100
    assert any(g.any() for g in expected.grads.values())
    for backend in backends:
        with load_backend(backend)(model, squared_error, clip=CLIP, verify=verify) as b:
            out = b(x, y)
        require_close(out.norms, expected.norms, 1e-10, backend)
        for name, g in expected.grads.items():
            require_close(out.grads[name], g, 1e-9, f"{backend}: {name}")


def require_close(found: Tensor | None, expected: Tensor | None, rtol: float, said: str) -> None:
    torch.testing.assert_close(found, expected, rtol=rtol, atol=rtol / 100, msg=lambda text: f"{said}: {text}")


@pytest.mark.parametrize("case", [*EXACT, *WRITTEN], ids=name_of)
def test_exact(case: Case):
    require_exact(case, *BACKENDS)


THIRD = [*EXACT, *WRITTEN][::3]


@pytest.mark.parametrize("case", slow_unless(lambda case: case in THIRD, [*EXACT, *WRITTEN]), ids=name_of)
def test_exact_with_verification(case: Case):
    """It looks at outputs and gradients, and not at how they came to be: a third of them shows it."""
    require_exact(case, "bk_mixed", verify=True)


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
