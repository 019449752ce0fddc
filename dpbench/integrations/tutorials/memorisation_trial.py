"""Run a `dpbench.training.MemorisationTrial`: the tutorial of that name, at one ε."""

import math
import time
import warnings
from typing import Any

from dpbench.trials.not_here import NotHere
from dpbench.trials.packages import is_missing, to_be_installed


def run(trial: Any) -> dict[str, Any]:
    """Bits of each secret that the model gives away; bits a byte of held-out code; ε if private.

    Args:
        trial: a `dpbench.training.MemorisationTrial`.

    Raises:
        NotHere: transformers or peft is not installed.
    """
    for needed in ("transformers", "accelerate", "peft"):
        if is_missing(needed):
            raise NotHere(f"expected {to_be_installed(needed)}, got none")
    from dpbench.integrations.huggingface import PrivacyArguments  # what it needs is here
    from dpbench.integrations.tutorials import memorisation as tutorial  # the same

    warnings.simplefilter("ignore", FutureWarning)
    prose, code, held_out = tutorial.lines(trial.seed)
    hidden, tested = tutorial.canaries(trial.seed), held_out[:1000]
    model = tutorial.pretrained(prose[: trial.public_records], epochs=trial.public_epochs, seed=trial.seed)
    before = tutorial.bits_per_byte(model, tested)
    privacy = None if trial.target_epsilon is None else PrivacyArguments(target_epsilon=trial.target_epsilon)
    private = tutorial.private_lines(code, hidden, trial.records)
    start = time.perf_counter()
    tuned, spent = tutorial.fine_tuned(model, private, privacy, epochs=trial.epochs, seed=trial.seed)
    return {
        "seconds": time.perf_counter() - start,
        "exposures": [
            {"times": times, "bits": tutorial.exposure(tuned, name, number)} for name, (number, times) in hidden.items()
        ],
        "bits_of_all": math.log2(tutorial.NUMBERS),
        "bits_per_byte": tutorial.bits_per_byte(tuned, tested),
        "bits_per_byte_before": before,
        "epsilon": None if spent is None else spent.epsilon,
        "delta": None if spent is None else spent.delta,
    }
