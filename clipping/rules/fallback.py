"""Any other operation: its vector-Jacobian product for one sample at a time, by torch.func.vmap or one after the other.

No formula is assumed. Row i of the output must depend on row i alone of every operand that depends on data, which the
first batch's verification checks.
"""

import math
from collections.abc import Callable, Sequence
from itertools import combinations
from typing import Any

import torch
from torch import Tensor

from clipping.core.batches import map_tensors, tensors_of
from clipping.numerics.rng_replay import Watched
from clipping.rules.base import Gradient, Refused, Rule, as_refused, title


class VmapRule(Rule):
    """D in func(*args, **kwargs).

    Args:
        parameter: D.
    """

    is_fallback = True

    def __init__(self, parameter: Tensor, func: Any, args: Any, kwargs: Any, data: list[Tensor]) -> None:
        super().__init__(parameter)
        self.func, self.args, self.kwargs = func, args, kwargs
        self.data = data

    def instantiate(self, g: Tensor, samples: slice, way: str = "") -> Tensor:
        data = self._with_rows(g)
        rows = [g[samples], *(x.detach()[samples] for x in data)]

        def gradient_of_one(g_one: Tensor, *of_one: Tensor) -> Tensor:
            _, pull, *_ = torch.func.vjp(self._of_one(data, of_one, g_one.shape), self.parameter.detach())
            return pull(g_one[None])[0]

        try:
            try:
                return torch.func.vmap(gradient_of_one)(*rows)
            except Exception:  # a custom function without a rule for vmap, for example
                return self._one_by_one(data, rows)
        except Exception as error:
            refused = as_refused(error)
            raise Refused(f"{title(self.func)}: {refused.reason}", refused.remedy) from error

    def _one_by_one(self, data: list[Tensor], rows: list[Tensor]) -> Tensor:
        found = []
        for g_one, *of_one in zip(*rows, strict=True):
            size = float(g_one.abs().sum())
            if not 0 < size < math.inf:  # also keeps NaN from operators that end the process for it
                found.append(torch.full_like(self.parameter, size * 0))
                continue
            parameter = self.parameter.detach().requires_grad_()
            with torch.enable_grad(), Watched() as watched:
                output = self._of_one(data, of_one, g_one.shape)(parameter)
            if watched.drew:
                raise Refused("draws random numbers, other ones when it runs again", "draw them before it")
            (gradient,) = torch.autograd.grad(output, parameter, g_one[None], allow_unused=True)
            found.append(torch.zeros_like(parameter) if gradient is None else gradient)
        return torch.stack(found)

    def _of_one(self, data: list[Tensor], of_one: Sequence[Tensor], shape: torch.Size) -> Callable[[Tensor], Tensor]:
        """Return parameter -> the output's row, [1, *shape], from one row of each tensor of `data`."""
        values = {id(whole): row[None] for whole, row in zip(data, of_one, strict=True)}

        def of(parameter: Tensor) -> Tensor:
            output: Tensor = self._with({**values, id(self.parameter): parameter})
            if output.shape != (1, *shape):
                raise Refused("no exact rule for a parameter with a row for each sample", "use microbatch or vmap")
            return output

        return of

    def _with(self, values: dict[int, Tensor]) -> Any:
        """Return the result with some tensors replaced, by their ids; the others are constants."""
        args, kwargs = map_tensors(lambda x: values.get(id(x), x.detach()), (self.args, self.kwargs))
        return self.func(*args, **kwargs)

    def _with_rows(self, g: Tensor) -> list[Tensor]:
        """Return the operands with one row a sample: the data, and constants that the operation needs row by row.

        A constant with as many rows as the batch may belong to it (a state of zeros) or not (as many positions as
        samples). As few as possible belong to it: those without which one row of the data gives no row of the output.
        """
        known = {id(x) for x in (*self.data, self.parameter)}
        others = [x for x in tensors_of((self.args, self.kwargs)) if id(x) not in known and x.shape[:1] == g.shape[:1]]
        for count in range(len(others)):
            for some in combinations(others, count):
                if len(g) == 1 or self._is_enough([*self.data, *some], g):
                    return [*self.data, *some]
        return [*self.data, *others]

    def _is_enough(self, rows: list[Tensor], g: Tensor) -> bool:
        try:
            with torch.no_grad():
                row = self._with({id(x): x.detach()[:1].nan_to_num() for x in rows})
        except (RuntimeError, ValueError, IndexError):
            return False
        return bool(row.shape == (1, *g.shape[1:]))


def fallback(
    func: Any, args: Any, kwargs: Any, output: Any, made_of_parameters: list[Tensor], data: list[Tensor]
) -> tuple[Tensor, Sequence[Gradient]]:
    """Return a `VmapRule` for each operand made of parameters.

    Args:
        made_of_parameters: its operands that are made of parameters alone.

    Raises:
        Refused: an operation in place, one with several outputs, or operands whose rows are not the output's.
    """
    name = title(func)
    remedy = "freeze it, or use microbatch or vmap"
    if (name.endswith("_") and not name.endswith("__")) or any(output is x for x in tensors_of((args, kwargs))):
        raise Refused("no exact rule for this operation in place", "use its out-of-place form")
    if not isinstance(output, Tensor):
        raise Refused("no exact rule for an operation with several outputs", remedy)
    unequal = [list(x.shape) for x in data if x.shape[:1] != output.shape[:1]]
    if output.dim() == 0 or unequal:
        raise Refused(f"no exact rule: its output {list(output.shape)} and operands {unequal} share no rows", remedy)
    return output, [(mine, VmapRule, func, args, kwargs, data) for mine in made_of_parameters]
