"""DP-SGD written out by hand: one record at a time, no engine."""

import torch

from dpbench.engine.sampling import Sampler


def by_hand(model, loss_of, settings, key, *, steps, clip, lr):
    """The parameters after DP-SGD without noise: each record's gradient alone, clipped, summed, divided by b.

    `loss_of(model, i)` is the loss of record i, and `lr(step)` the learning rate.
    """
    model.train()
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    sampler = Sampler(settings, key)
    for step in range(steps):
        total = {name: torch.zeros_like(p) for name, p in parameters.items()}
        for i in sampler.batch(step).tolist():
            grads = torch.autograd.grad(loss_of(model, i), parameters.values(), materialize_grads=True)
            norm = torch.sqrt(sum((g * g).sum() for g in grads))
            for name, g in zip(parameters, grads, strict=True):
                total[name] += g * min(1.0, clip / float(norm))
        with torch.no_grad():
            for name, p in parameters.items():
                p -= lr(step) * total[name] / settings.batch_size
    return {name: p.detach() for name, p in parameters.items()}
