"""The bodies of trials and their instruments. They run in the trial's own process; most import torch.

**A step** is one call of a clipping backend: from a batch to the (clipped) summed gradient of every parameter. It
excludes noise and the optimizer's update: they are the same for every backend, touch each parameter once whatever the
batch size, and would only dilute the ratios. The result is freed when the step ends.

Functions take:
    trial: the trial to run.
    device: the trial's device.
    workload: model, loss function and data.
    batch: (inputs, targets), every tensor [B, ...].
    inputs, targets: one batch.
    batch_size: B.
    precision: the name of a precision profile (`dpbench.trials.precision`).
    step: runs one step.
    model: the module that is trained.
    clip: norms [B] -> factors [B].
    steps, count: how many steps.
    samples: how many samples.
    entries: one for each backend.
    number, position: of the round, and within it, from 0.
    seed: of the trial.
    trace: of the steps.
    result: of a body.
"""
