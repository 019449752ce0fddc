"""Write an engine's public numbers to TensorBoard, Weights & Biases or a similar logger."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dpbench.engine.state import State

#: The accountant takes at most 1 / _SHARE of training's time.
_SHARE = 50


class Log:
    """Writes a step's public numbers: ε, δ, σ, the clipping threshold, the expected batch size and the step's number.

    These are settings, or computed from settings and the number of steps. Mean loss, accuracy, gradient norms, the
    number of clipped gradients and the actual batch size depend on the records, without noise and outside ε. They are
    not written. Log them yourself if all readers of the log may see the data.

    ε is computed after the first step, and then as often as 2 % of the time allows: an accountant may take a second.

    Args:
        writer: has add_scalar(name, value, step), as torch's SummaryWriter, or log(dict), as a wandb run; or None.

    Raises:
        ValueError: the writer has neither.
    """

    def __init__(self, writer: Any) -> None:
        if writer is not None and not any(callable(getattr(writer, name, None)) for name in ("add_scalar", "log")):
            raise ValueError(f"expected log with add_scalar(name, value, step) or log(dict), got {writer!r}")
        self._writer, self._step, self._next = writer, 0, 0.0

    def __reduce__(self) -> tuple[type[Log], tuple[None]]:
        """A copy of an engine writes nothing, as its steps would repeat the original's numbers."""
        return Log, (None,)

    def tell(self, engine: State, *, now: bool = False) -> None:
        """Write the state after the engine's last step, once, if it is time."""
        begin = time.monotonic()
        if self._writer is None or engine.steps == self._step or (begin < self._next and not now):
            return
        self._step, spent = engine.steps, engine.privacy_spent()
        self._write(
            {
                "privacy/epsilon": spent.epsilon,
                "privacy/delta": spent.delta,
                "privacy/noise_multiplier": spent.noise_multiplier,
                "privacy/clipping_threshold": float(getattr(engine.clip, "max_grad_norm", engine.clip.sensitivity)),
                "privacy/expected_batch_size": float(engine.settings.batch_size),
            }
        )
        self._next = begin + _SHARE * (time.monotonic() - begin)

    def _write(self, values: Mapping[str, float]) -> None:
        if callable(getattr(self._writer, "add_scalar", None)):
            for name, value in values.items():
                self._writer.add_scalar(name, value, self._step)
        else:  # without wandb's own step, which must not fall, and which the caller may count otherwise
            self._writer.log({**values, "privacy/step": self._step})
