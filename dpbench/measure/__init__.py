"""The bodies of trials, and the instruments they use. They run in the trial's own process; most import torch.

==========  ==========================================================================================
`step`      one training step: verified, timed, its memory taken
`overhead`  many backends on one model, interleaved: what each costs beside ordinary training
`recommend` every backend on one model, within a time
`race`      which of them is the fastest: turns, rounds, finalists
`largest`   the largest batch that fits, by a simulated search
`memory`    the measured peak of a step: CUDA's allocator statistics, or the CPU allocator's events
`simulate`  the peak of a step that is never computed: fake tensors and the lifetimes of their storages
`timing`    warm-up and per-step times
`verify`    the answer of a step beside the microbatch oracle's
`check`     a backend on batches that are hard to get right
`bench`     from a trial to a step that can be run
==========  ==========================================================================================

**A step** is one call of a clipping backend: from a batch to the (clipped) summed gradient of every parameter. Noise
and the optimizer's update are left out: they are the same for every backend, touch each parameter once whatever the
batch size, and would only dilute the ratios. The result is released when the step ends.
"""
