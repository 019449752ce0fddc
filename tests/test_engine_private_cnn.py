"""Programs written for private_CNN's engine, with another import: its README's two examples, on small images."""

from __future__ import annotations

import opacus
import pytest
import torch
import torch.nn.functional as F
import torchvision

from dpbench import PrivacyEngine


def resnet():
    torch.manual_seed(0)
    return opacus.validators.ModuleValidator.fix(torchvision.models.resnet18(num_classes=10))


@pytest.mark.parametrize(
    ("choice", "backend"),
    [
        ({"ghost_clipping": True, "mixed": True}, "mixed_ghost"),
        ({"ghost_clipping": True, "mixed": False}, "ghost"),
        ({"ghost_clipping": False}, "fastgradclip"),
        ({}, "bk_mixed"),
    ],
)
def test_one_step_with_each_of_its_choices(choice, backend):
    model = resnet()
    optimizer = torch.optim.Adam(params=model.parameters(), lr=1e-4)
    privacy_engine = PrivacyEngine(
        model, batch_size=256, sample_size=50000, epochs=3, max_grad_norm=0.1, target_epsilon=3, **choice
    )
    privacy_engine.attach(optimizer)
    before = model.fc.weight.detach().clone()
    logits = model(torch.randn(3, 3, 32, 32))
    loss = F.cross_entropy(logits, torch.tensor([1, 2, 3]), reduction="none")
    optimizer.step(loss=loss)
    assert privacy_engine.backend == backend
    assert torch.isfinite(model.fc.weight).all() and not torch.equal(model.fc.weight, before)
    assert 0 < privacy_engine.privacy_spent().epsilon < 3


def test_accumulation_in_its_order():
    model = resnet()
    optimizer = torch.optim.Adam(model.parameters())
    privacy_engine = PrivacyEngine(
        model, batch_size=6, sample_size=500, epochs=3, max_grad_norm=0.1, target_epsilon=3, ghost_clipping=True
    )
    privacy_engine.attach(optimizer)
    for i in range(4):
        batch, labels = torch.randn(2, 3, 32, 32), torch.tensor([i, 1])
        loss = F.cross_entropy(model(batch), labels, reduction="none")
        if i % 3 == 0:
            optimizer.step(loss=loss)
            optimizer.zero_grad()
        else:
            optimizer.virtual_step(loss=loss)
    assert privacy_engine.steps == 2
