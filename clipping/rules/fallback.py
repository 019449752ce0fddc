"""Any other operation: its vector-Jacobian product for one sample at a time, by torch.func.vmap.

No formula is assumed. Row i of the output must depend on row i alone of every operand that depends on data, which the
first batch's verification checks.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from clipping.core.batches import map_tensors, tensors_of
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

        def gradient_of_one(g_one: Tensor, *rows: Tensor) -> Tensor:
            values = {id(whole): row[None] for whole, row in zip(data, rows, strict=True)}

            def of(parameter: Tensor) -> Tensor:
                return self._with({**values, id(self.parameter): parameter})

            row, pull, *_ = torch.func.vjp(of, self.parameter.detach())
            if row.shape[1:] != g_one.shape or row.shape[0] != 1:
                raise Refused("no exact rule for a parameter with a row for each sample", "use microbatch or vmap")
            return pull(g_one[None])[0]

        try:
            return torch.func.vmap(gradient_of_one)(g[samples], *(x.detach()[samples] for x in data))
        except Exception as error:
            refused = as_refused(error)
            raise Refused(f"{title(self.func)}: {refused.reason}", refused.remedy) from error

    def _with(self, values: dict[int, Tensor]) -> Any:
        """Return the result with some tensors replaced, by their ids; the others are constants."""
        args, kwargs = map_tensors(lambda x: values.get(id(x), x.detach()), (self.args, self.kwargs))
        return self.func(*args, **kwargs)

    def _with_rows(self, g: Tensor) -> list[Tensor]:
        """Return the operands with one row a sample: the data, and constants that the operation needs row by row.

        A constant with as many rows as the batch may belong to it (a state of zeros) or not (as many positions as
        samples). It does not if the first row of the data and the whole constant give one row of the output.
        """
        known = {id(x) for x in (*self.data, self.parameter)}
        others = [x for x in tensors_of((self.args, self.kwargs)) if id(x) not in known and x.shape[:1] == g.shape[:1]]
        return [*self.data, *others] if others and len(g) > 1 and not self._is_enough(g) else self.data

    def _is_enough(self, g: Tensor) -> bool:
        here = {id(x): x.detach()[:1] for x in self.data}
        try:
            with torch.no_grad():
                row = self._with(here)
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
    if name.endswith("_") and not name.endswith("__"):
        raise Refused("no exact rule for this operation in place", "use its out-of-place form")
    if not isinstance(output, Tensor):
        raise Refused("no exact rule for an operation with several outputs", remedy)
    unequal = [list(x.shape) for x in data if x.shape[:1] != output.shape[:1]]
    if output.dim() == 0 or unequal:
        raise Refused(f"no exact rule: its output {list(output.shape)} and operands {unequal} share no rows", remedy)
    return output, [(mine, VmapRule, func, args, kwargs, data) for mine in made_of_parameters]
