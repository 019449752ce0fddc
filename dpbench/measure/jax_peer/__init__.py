"""jax_privacy's whole training step, as a peer of the training steps in torch.

=========  ===========================================================================================
`models`   the benchmark's models as functions in jax, with PyTorch's parameters
`worker`   the process that computes and times the steps; it imports no torch
`handed`   starts that process with weights and a batch as numpy arrays, and talks to it
`entry`    the engine's entry in a `TrainingStepTrial`: verified, timed in turns, recorded
=========  ===========================================================================================
"""
