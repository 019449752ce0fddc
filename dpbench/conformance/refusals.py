"""Models that most backends must refuse: right is the oracle's answer or a refusal, and nothing else.

*Hidden reads*: what no hook and no mode sees of a parameter, its share being missing from the norm.

*Samples that mix*, so that there is no gradient of a sample in the batch; right is that of the sample alone, which few
can give. Here verification is on, and counts as a refusal: what the interface does for every backend is a part of it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from clipping import Backend, Flat, Problem, UnsupportedModel
from clipping.checks.verification import WrongGradient
from dpbench.conformance.cases import BATCH, squared_error
from dpbench.conformance.contract import median
from dpbench.conformance.judging import TOLERANCE, Check, Measured, hold, opened, oracle, placed, worse
from dpbench.conformance.oddities import (
    Forces,
    FusedBeside,
    FusedLater,
    Mixing,
    Sorting,
    by_detached_mean,
    by_rolling,
    by_statistics,
)


def held(make: Callable[[], nn.Module], verify: bool, backend: type[Backend], device: str) -> Measured:
    """Beside the oracle, one step; and a second one of a model that is not yet `late`.

    Args:
        make: a model of samples [4].
        verify: let the backend verify itself, and take what it finds for a refusal.
        backend: the class that is judged.
        device: where it runs.
    """
    x = torch.randn(BATCH, 4).double()
    x[:, 0] = torch.tensor([0.0, 1.0, 4.0, 2.0, 3.0])  # of two samples the order stays, of all it does not
    model = make().double()
    y = torch.randn(BATCH, model(x).shape[1]).double()
    setup = model, x, y, loss = placed((model, x, y, squared_error), device)
    clip = Flat(median(setup))
    try:
        with opened(backend, model, loss, clip, verify) as b:
            agreement = hold(b(x, y), oracle(setup, clip), TOLERANCE)
            if isinstance(model, (FusedLater, Mixing)) and not model.late:
                model.late = True
                agreement = worse(agreement, hold(b(x, y), oracle(setup, clip), TOLERANCE, " of the second step"))
            return Measured(agreement, dict(b.coverage))
    except WrongGradient as found:
        problem = Problem("model", f"verification says {found}", "use microbatch")
        raise UnsupportedModel(backend.name, [problem]) from found


HIDDEN: dict[str, Callable[[], nn.Module]] = {
    "a custom function beside another use": FusedBeside,
    "a custom function from the second step on": FusedLater,
    "a derivative of a derivative": Forces,
}
MIXING: dict[str, Callable[[], nn.Module]] = {
    "statistics in training alone": partial(Mixing, by_statistics),
    "a detached mean": partial(Mixing, by_detached_mean),
    "rolled by two": partial(Mixing, by_rolling),
    "rows in another order": Sorting,
    "from the second step on": partial(Mixing, by_statistics, late=False),
}
REFUSALS: dict[str, Check] = {
    **{name: partial(held, make, False) for name, make in HIDDEN.items()},
    **{f"samples mix: {name}": partial(held, make, True) for name, make in MIXING.items()},
}
"""Name -> check."""
