"""Models that most backends must refuse: only the oracle's result or a refusal is right.

*Hidden reads*: reads of a parameter that no hook and no mode sees, so its share is missing from the norm.

*Samples that mix*: a sample has no gradient in the batch. The right result is the gradient of the sample alone, which
few backends can compute. Verification is on and counts as a refusal, since the interface runs it for every backend.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from clipping import Backend, Flat, Problem, UnsupportedModel
from clipping.checks.verification import WrongGradient
from dpbench.conformance import modules as nets
from dpbench.conformance.cases import BATCH, squared_error
from dpbench.conformance.contract import median
from dpbench.conformance.judging import TOLERANCE, Check, Measured, hold, oracle, placed, worse


def held(make: Callable[[], nn.Module], verify: bool, backend: type[Backend], device: str) -> Measured:
    """Compare one step with the oracle, and a second one if the model is not yet `late`.

    Args:
        make: a model of samples [4].
        verify: let the backend verify itself, and count its finding as a refusal.
    """
    x = torch.randn(BATCH, 4).double()
    x[:, 0] = torch.tensor([0.0, 1.0, 4.0, 2.0, 3.0])  # keeps the order of two samples, but not of all
    model = make().double()
    y = torch.randn(BATCH, model(x).shape[1]).double()
    setup = model, x, y, loss = placed((model, x, y, squared_error), device)
    clip = Flat(median(setup))
    try:
        with backend(model, loss, clip=clip, verify=verify) as b:
            agreement = hold(b(x, y), oracle(setup, clip), TOLERANCE)
            if isinstance(model, (nets.FusedLater, nets.Mixing)) and not model.late:
                model.late = True
                agreement = worse(agreement, hold(b(x, y), oracle(setup, clip), TOLERANCE, " of the second step"))
            return Measured(agreement, dict(b.coverage))
    except WrongGradient as found:
        problem = Problem("model", f"verification says {found}", "use microbatch")
        raise UnsupportedModel(backend.name, [problem]) from found


HIDDEN: dict[str, Callable[[], nn.Module]] = {
    "a custom function beside another use": nets.fused_beside,
    "a custom function from the second step on": nets.FusedLater,
    "a derivative of a derivative": nets.forces,
}
MIXING: dict[str, Callable[[], nn.Module]] = {
    "statistics in training alone": partial(nets.Mixing, nets.by_statistics),
    "a detached mean": partial(nets.Mixing, nets.by_detached_mean),
    "rolled by two": partial(nets.Mixing, nets.by_rolling),
    "rows in another order": nets.sorting,
    "from the second step on": partial(nets.Mixing, nets.by_statistics, late=False),
}
REFUSALS: dict[str, Check] = {
    **{name: partial(held, make, False) for name, make in HIDDEN.items()},
    **{f"samples mix: {name}": partial(held, make, True) for name, make in MIXING.items()},
}
"""Name -> check."""
