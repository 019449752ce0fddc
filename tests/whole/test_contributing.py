"""The step by hand at the end of CONTRIBUTING.md is what the backends compute."""

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from clipping import Flat, load_backend

TEXT = (Path(__file__).resolve().parents[2] / "CONTRIBUTING.md").read_text()
STEP: dict[str, Any] = {}
exec(re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)[-1], STEP)


@pytest.mark.parametrize("name", ["microbatch", "vmap", "fastgradclip", "ghost", "mixed_ghost", "bk_ghost", "bk_mixed"])
def test_the_step_by_hand_has_the_sum_of_each_backend(name):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    x, y = torch.randn(12, 6, dtype=torch.float64) * torch.logspace(-2, 1, 12).double()[:, None], torch.arange(12) % 3
    backend = load_backend(name)(model, nn.CrossEntropyLoss(reduction="none"), clip=Flat(max_grad_norm=STEP["C"]))
    with backend:
        wanted = backend(x, y)
    assert 0 < int((wanted.norms < 1).sum()) < 12  # some are clipped, and some are not
    before = copy.deepcopy(model)
    found = STEP["private_step"](model, x, y, torch.Generator().manual_seed(7))
    generator = torch.Generator().manual_seed(7)
    for (name, p), (_, old) in zip(model.named_parameters(), before.named_parameters(), strict=True):
        torch.testing.assert_close(found[name], wanted.grads[name], rtol=1e-12, atol=1e-15)
        noise = torch.randn(p.shape, generator=generator, dtype=p.dtype) * STEP["SIGMA"] * STEP["C"]
        torch.testing.assert_close(p, old - STEP["LR"] * (found[name] + noise) / STEP["BATCH_SIZE"])
