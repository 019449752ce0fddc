"""DP-AdamBC: Adam that subtracts the noise's share from its second moment.

Adam divides the mean m of the gradients by the root of the mean v of their squares. Privacy adds noise of variance Φ to
each entry of a gradient, so v estimates E[g²] + Φ. Where Φ dominates, every entry is divided by about √Φ, and Adam
becomes SGD with momentum. Φ = (σS/b)² is public, and is subtracted:

    m ← β₁ m + (1 - β₁) g,    v ← β₂ v + (1 - β₂) (g² - Φ)
    θ ← θ - η m̂ / (√max(v̂, γ') + eps),    m̂ = m / (1 - β₁^t),    v̂ = v / (1 - β₂^t)

With a constant Φ this v̂ is the paper's v̂ - Φ; otherwise each step's Φ is subtracted from its own squared gradient.
The correction uses released values only, and costs no privacy. (Tang, Shpilevskiy and Lécuyer 2024, arXiv:2312.14334,
whose denominator has no eps)
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Adam
from torch.optim.adam import adam

from dpbench.engine.errors import Misuse


class AdamBC(Adam):
    """torch's Adam with DP-AdamBC's bias correction; AdamW with `decoupled_weight_decay=True`.

    The attached `PrivacyEngine` sets the noise of every step. Without noise and `floor` the results equal torch's Adam
    to the bit. The state is Adam's, with v as above, and one more number a parameter.

    Args:
        params, lr, betas, eps, weight_decay: as in `torch.optim.Adam`.
        floor: γ' > 0, in squared units of a gradient divided by the batch size. None: the standard deviation that noise
            alone gives v̂, (2 Σ_i w_i² Φ_i²)^½ with v̂'s weights w_i; a smaller entry cannot be distinguished from
            noise. The paper tunes γ'; this default is not the paper's.
        options: maximize, foreach and decoupled_weight_decay, as in `torch.optim.Adam`.

    Raises:
        ValueError: a floor that is not above 0, β₂ = 0, amsgrad, capturable, differentiable or fused.
    """

    noise: float | None = None
    """√Φ: standard deviation of the noise in each entry of the next gradients, set by the engine; None: unknown."""

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        floor: float | None = None,
        **options: Any,
    ) -> None:
        _require({"floor": floor})
        super().__init__(params, lr, betas, eps, weight_decay, **options)
        self.defaults["floor"] = floor
        for group in self.param_groups:
            group.setdefault("floor", floor)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's; a group may have its own `floor`. Raises as the class does.

        Args:
            param_group: "params" and their options.
        """
        _require({**self.defaults, **param_group})
        super().add_param_group(param_group)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Also accepts a state of torch's Adam; the noise already in its v stays there and decays."""
        for group in state["param_groups"]:
            _require(group)
        super().__setstate__(state)
        for group in self.param_groups:
            group.setdefault("floor", self.defaults["floor"])

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Perform one step. Raises Misuse if `noise` is unknown, and ValueError for complex parameters.

        Args:
            closure: computes the loss, as in torch; the engine passes none.
        """
        if self.noise is None:
            raise Misuse(
                "expected PrivacyEngine.attach(optimizer) before a step of AdamBC, got one whose noise is not known; "
                "in a loop without the engine set optimizer.noise to its deviation in .grad, 0.0 for none"
            )
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            self._update(group, self.noise**2)
        return loss

    def _update(self, group: dict[str, Any], variance: float) -> None:
        """Run torch's `adam` with Φ subtracted from v and the floors in place of amsgrad's maximum."""
        params: list[Tensor] = []
        grads: list[Tensor] = []
        means: list[Tensor] = []
        squares: list[Tensor] = []
        steps: list[Tensor] = []
        if self._init_group(group, params, grads, means, squares, [], steps):
            raise ValueError("expected real parameters for AdamBC, got complex ones; take torch.optim.Adam")
        if not params:
            return
        beta1, beta2 = group["betas"]
        taken, least = (1 - beta2) * variance, []
        for p, step in zip(params, steps, strict=True):
            state = self.state[p]
            state["v_variance"] = beta2**2 * state.get("v_variance", 0.0) + 2 * taken**2  # the noise's part of Var[v]
            floor = group["floor"]
            least.append(math.sqrt(state["v_variance"]) if floor is None else floor * (1 - beta2 ** (float(step) + 1)))
        torch._foreach_sub_(squares, taken / beta2)
        floors = [torch.empty_like(v) for v in squares]
        torch._foreach_zero_(floors)
        torch._foreach_add_(floors, least)
        names = ("lr", "weight_decay", "eps", "maximize", "foreach", "decoupled_weight_decay")
        adam(
            params,
            grads,
            means,
            squares,
            floors,
            steps,
            amsgrad=True,
            beta1=beta1,
            beta2=beta2,
            **{name: group[name] for name in names},
        )


def _require(options: Mapping[str, Any]) -> None:
    for name in ("amsgrad", "capturable", "differentiable", "fused"):
        if options.get(name):
            raise ValueError(f"expected {name}=False for AdamBC, got True; leave it out, or take torch.optim.Adam")
    floor = options.get("floor")
    if floor is not None and not 0 < floor < math.inf:
        raise ValueError(f"expected a finite floor > 0 or None for AdamBC, got {floor!r}")
    if "betas" in options and not options["betas"][1] > 0:
        raise ValueError(f"expected betas[1] > 0 for AdamBC, got {options['betas'][1]!r}")
