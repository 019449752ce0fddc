"""Programs written for private_CNN's engine, with another import: its README's two examples, on small images.

The model, the optimizer and every argument of the engine are those of the examples. What they leave to the reader (data
loading, `F`, `logits`, the engine's arguments in the second) is filled in.
"""

from __future__ import annotations

import opacus
import pytest
import torch
import torch.nn.functional as F
import torchvision
from marks import slow_unless

from dpbench import PrivacyEngine


@pytest.mark.parametrize(
    ("choice", "backend"),
    slow_unless(
        lambda choice, backend: backend == "mixed_ghost",
        [
            ({"ghost_clipping": True, "mixed": True}, "mixed_ghost"),
            ({"ghost_clipping": True, "mixed": False}, "ghost"),
            ({"ghost_clipping": False}, "fastgradclip"),
            ({}, "bk_mixed"),
        ],
    ),
)
def test_the_first_example(choice, backend):
    torch.manual_seed(0)
    model = torchvision.models.resnet18()

    # replace BatchNorm by GroupNorm or LayerNorm
    model = opacus.validators.ModuleValidator.fix(model)

    optimizer = torch.optim.Adam(params=model.parameters(), lr=1e-4)
    privacy_engine = PrivacyEngine(
        model,
        batch_size=256,
        sample_size=50000,
        epochs=3,
        max_grad_norm=0.1,
        target_epsilon=3,
        **choice,
    )
    privacy_engine.attach(optimizer)

    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    logits, labels = model(torch.randn(3, 3, 32, 32)), torch.tensor([1, 2, 3])
    loss = F.cross_entropy(logits, labels, reduction="none")
    # do not use loss.backward()
    optimizer.step(loss=loss)

    assert privacy_engine.backend == backend
    for name, p in model.named_parameters():
        assert torch.isfinite(p).all() and not torch.equal(p, before[name])
    spent = privacy_engine.privacy_spent()
    assert 0 < spent.epsilon < 3 and (spent.steps, spent.sample_rate, spent.delta) == (1, 256 / 50000, 1e-5)


def test_the_second_example():
    gradient_accumulation_steps = 3  # of its 10

    torch.manual_seed(0)
    model = torchvision.models.resnet18()
    model = opacus.validators.ModuleValidator.fix(model)
    optimizer = torch.optim.Adam(model.parameters())
    privacy_engine = PrivacyEngine(
        model, batch_size=6, sample_size=500, epochs=3, max_grad_norm=0.1, target_epsilon=3, ghost_clipping=True
    )
    privacy_engine.attach(optimizer)

    dataloader = [torch.randn(2, 3, 32, 32) for _ in range(4)]
    labels = torch.tensor([3, 1])
    steps = []
    for i, batch in enumerate(dataloader):
        loss = F.cross_entropy(model(batch), labels, reduction="none")
        if i % gradient_accumulation_steps == 0:
            optimizer.step(loss=loss)
            optimizer.zero_grad()
        else:
            optimizer.virtual_step(loss=loss)
        steps.append(privacy_engine.steps)
    assert steps == [1, 1, 1, 2]
