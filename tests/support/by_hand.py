"""Clipping and DP-SGD written out by hand: one record at a time, by autograd alone."""

import torch

from dpbench.engine.sampling import Sampler


def clipped_sum(losses, parameters, clip):
    """Σ of the clipped gradients of each loss by itself: name -> tensor."""
    total = {name: torch.zeros_like(p) for name, p in parameters.items()}
    for loss in losses:
        grads = torch.autograd.grad(loss, parameters.values(), retain_graph=True, materialize_grads=True)
        norm = torch.sqrt(sum((g * g).sum() for g in grads))
        for name, g in zip(parameters, grads, strict=True):
            total[name] += g * min(1.0, clip / float(norm))
    return total


def by_hand(model, loss_of, settings, key, *, steps, clip, lr):
    """The parameters after DP-SGD without noise: each record's gradient alone, clipped, summed, divided by b.

    `loss_of(model, i)` is the loss of record i, and `lr(step)` the learning rate.
    """
    model.train()
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    sampler = Sampler(settings, key)
    for step in range(steps):
        total = clipped_sum((loss_of(model, i) for i in sampler.batch(step).tolist()), parameters, clip)
        with torch.no_grad():
            for name, p in parameters.items():
                p -= lr(step) * total[name] / settings.batch_size
    return {name: p.detach() for name, p in parameters.items()}
