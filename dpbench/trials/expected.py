"""Estimate how long a trial takes on a GPU before any record exists there.

The numbers are from records of an H100 and an H200 (2026-11-26; 16 host cores, torch 2.11). Simulated searches are
means over eight backends; `OPENING` is an `overhead` trial's time beyond its turns, for each backend. Trials without a
record (a confirming step, an engine's whole step) are sums of these parts, and rather too long. Times of programs are
guesses.
"""

from dpbench.trials.base import Trial

#: A process with a CUDA context and a model.
START = 1.0
#: A turn of one backend, with the garbage collection before it.
TURN = 0.3
#: Opening one backend, verifying it and warming it up.
OPENING = {"resnet18": 1.3, "transformers:gpt2@1024": 2.6, "timm:vit_base_patch16_224": 3.1, "resnet50": 3.4}
OPENING |= {"transformers:roberta@128": 4.0, "cnn": 1.0, "vgg11": 1.3}
#: A whole simulated search in one process, with seven others running.
SEARCHES = {"resnet18": 7.4, "resnet34": 6.1, "resnet50": 10.0, "resnet101": 14.0, "resnet152": 17.1}
SEARCHES |= {"vgg11": 5.5, "vgg13": 6.2, "vgg16": 5.8, "vgg19": 6.2}
#: Capturing, tracing and comparing one engine's step, by its way; TorchInductor keeps its code for later trials.
PROGRAMS = {"traced": 15.0, "replayed": 20.0, "compiled": 60.0, "best": 30.0}
#: Verifying a backend and running two steps that fill 16 GiB.
CONFIRMED = {"nonprivate": 3.0, "microbatch": 4.0, "vmap": 3.2, "opacus_hooks": 4.0}
#: One sample's forward and backward pass, as in `microbatch`.
SAMPLE = {"resnet18": 0.016, "resnet34": 0.028, "resnet50": 0.041}
#: Kinds whose time hardly depends on their fields.
KINDS = {"device": 2.1, "parts": 10.0, "profile": 8.5, "peak": 4.0}
NORMS = {"linear": 3.0, "convolution": 3.5}
_OTHER = 3.0


def expected_seconds(trial: Trial) -> float | None:
    """Seconds of a trial on a GPU; None on a CPU, and for an unknown kind."""
    if getattr(trial, "device", None) != "cuda":
        return None
    model = str(getattr(trial, "model", ""))
    if trial.kind in ("overhead", "training_step"):
        backends, rounds = getattr(trial, "backends", ()), getattr(trial, "rounds", 1)
        own_model = 1.0 if trial.kind == "training_step" else 0.0  # each engine has a model and an optimizer
        each = OPENING.get(model, _OTHER) + own_model + TURN * rounds + PROGRAMS.get(getattr(trial, "way", ""), 0.0)
        steps = 6 * getattr(trial, "batch_size", 1) * SAMPLE.get(model, 0.03) if "microbatch" in backends else 0.0
        return START + len(backends) * each + steps
    if trial.kind == "largest":
        return SEARCHES.get(model, 10.0)
    if trial.kind == "confirm":
        return CONFIRMED.get(str(getattr(trial, "backend", "")), 6.0)
    if trial.kind == "norms":
        return NORMS.get(str(getattr(trial, "family", "")), 2.0)
    return KINDS.get(trial.kind)
