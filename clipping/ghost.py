"""Two backward passes: one for the norms, one for the gradient of Σ_i c_i ℓ_i.

The first pass computes activation gradients only; at each use of a parameter its squared norms are found and added up,
by Gram matrices (ghost norm) or from the instantiated per-sample gradient. The second is an ordinary backward pass with
each sample's loss multiplied by its factor, which treats c as a constant. (Li et al. 2021, arXiv:2110.05679; for
convolutions and the mixed rule Bu et al. 2022, arXiv:2205.10683, Algorithm 1)

With per-layer clipping each parameter has factors of its own, which no weighting of the losses can express: then the
weighted gradient is formed where the norm is found, and there is no second pass.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor

from clipping.interface import Backend, ClippedGradient, Parameters, Problem, UnsupportedModel
from clipping.norms import LayerNorms, Norms
from clipping.oracle import gradients, with_zeros
from clipping.rules import Refused, Rule
from clipping.tape import Tape, unrecorded


class TwoPass(Backend):
    """The machine under `FastGradClip`, `Ghost` and `MixedGhost`, which differ in the route of a norm alone."""

    _graph_checked = False

    @abstractmethod
    def by_ghost(self, rule: Rule) -> bool:
        """Is this rule's norm found by Gram matrices (asked only where it has them)?"""

    def _clipped(self, parameters: Parameters, inputs: Any, targets: Any, batch_size: int) -> ClippedGradient:
        tape = Tape(parameters, (inputs, targets), batch_size)
        try:
            with tape:
                losses = self.losses(inputs, targets, batch_size)
            self._refuse(tape, losses, parameters)
            norms = self._norms(tape, losses, parameters)
            tape.backward(losses, norms.arrived)
        except Refused as refused:  # found out only when the gradient arrived
            raise UnsupportedModel(self.name, [Problem("model", refused.reason, refused.remedy)]) from refused
        finally:
            tape.close()
        with torch.no_grad():  # the factors are constants of the second pass
            total = norms.total()
        if isinstance(norms, LayerNorms):
            grads = norms.grads
        else:
            factors = self.clip.factors(total)
            grads = gradients((factors.to(losses.dtype) * losses).sum(), parameters)
        self.coverage = norms.coverage(parameters)
        return ClippedGradient(with_zeros(grads, parameters), total, losses.detach())

    def _norms(self, tape: Tape, losses: Tensor, parameters: Parameters) -> Norms:
        kind = LayerNorms if self.clip.per_layer else Norms
        return kind(self.by_ghost, tape.counts, losses, parameters, self.clip)

    def _refuse(self, tape: Tape, losses: Tensor, parameters: Parameters) -> None:
        problems = tape.problems
        if not problems and not self._graph_checked:
            problems = unrecorded(losses, tape, parameters)
            self._graph_checked = not problems
        if problems:
            raise UnsupportedModel(self.name, dict.fromkeys(problems))


class FastGradClip(TwoPass):
    """Every per-sample gradient instantiated, one use at a time, and let go once its norm is known.

    (Lee and Kifer 2020, arXiv:2009.03106)
    """

    name = "fastgradclip"

    def by_ghost(self, rule: Rule) -> bool:
        return False


class Ghost(TwoPass):
    """Ghost norm wherever a use has one: weights of linear layers, convolutions and embeddings."""

    name = "ghost"

    def by_ghost(self, rule: Rule) -> bool:
        return True


class MixedGhost(TwoPass):
    """Ghost norm where it takes less space than the gradient: 2T² ≤ pd. (arXiv:2205.10683, equation 4.1)

    With groups there are as many Gram pairs as groups, and as many blocks of p·d entries: the rule is the same.
    """

    name = "mixed_ghost"

    def by_ghost(self, rule: Rule) -> bool:
        return 2 * rule.positions**2 <= rule.inputs * rule.outputs
