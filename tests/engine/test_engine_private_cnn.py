"""A program written for private_CNN's engine, with another import: its README's two examples, on small images.

The model, the optimizer and every argument of the engine are those of the first example, the loop is that of the
second. What they leave to the reader (data loading, `F`, `logits`) is filled in.
"""

import opacus
import torch
import torch.nn.functional as F
import torchvision

from dpbench import PrivacyEngine
from dpbench.engine.settings import usable_backend


def test_its_examples():
    gradient_accumulation_steps = 2  # of its 10

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
        ghost_clipping=True,
        mixed=True,
    )
    privacy_engine.attach(optimizer)

    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    dataloader = [torch.randn(2, 3, 32, 32) for _ in range(3)]
    labels = torch.tensor([3, 1])
    steps = []
    for i, batch in enumerate(dataloader):
        loss = F.cross_entropy(model(batch), labels, reduction="none")
        # do not use loss.backward()
        if i % gradient_accumulation_steps == 0:
            optimizer.step(loss=loss)
            optimizer.zero_grad()
        else:
            optimizer.virtual_step(loss=loss)
        steps.append(privacy_engine.steps)
    assert steps == [1, 1, 2]

    for name, p in model.named_parameters():
        assert torch.isfinite(p).all() and not torch.equal(p, before[name])
    spent = privacy_engine.privacy_spent()
    assert 0 < spent.epsilon < 3 and (spent.steps, spent.sample_rate, spent.delta) == (2, 256 / 50000, 1e-5)


def test_its_switches_choose_a_backend():
    for switches, backend in [((True, True), "mixed_ghost"), ((True, False), "ghost"), ((False, None), "fastgradclip")]:
        assert usable_backend("bk_mixed", *switches)[0] == backend
