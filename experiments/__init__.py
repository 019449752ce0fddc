"""Experiments: one Python file each, declarations only. `dpbench.experiment` finds them on disk.

Each has an `EXPERIMENT`: `cells(device)` gives its trials, `smoke(device)` a few small ones of every kind.

Functions take:
    device: "cpu" or "cuda".
    axes, epochs, runs, sigmas, targets: the values to measure at; by default those of the whole experiment.
"""
