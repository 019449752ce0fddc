"""Computes jax_privacy's steps, in a process that imports no torch."""

import contextlib
import functools
import os
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from dpbench.measure.jax_peer import Settings
from dpbench.measure.jax_peer.models import MODELS, losses, to_jax, to_torch

with contextlib.suppress(ImportError):  # documentation is built without jax; `handed` asks first
    import jax
    import jax.numpy as jnp
    import jax_privacy
    import optax
    from jax_privacy.noise_addition import gaussian_privatizer

#: Samples whose gradients are computed at once by vmap: all of the batch, or one. The faster is timed.
MICROBATCHES = (None, 1)
NOISE_MULTIPLIER = 1.0
#: The steps of this process, once it has started.
_STEPS: list["_Steps"] = []


class _Steps:
    """The model and the batch, and the private and the plain step of one optimizer on them.

    Args:
        settings: of the process.
        arrays: parameters, as ``p/NAME``, ``inputs`` and ``targets``, in PyTorch's layouts.
    """

    def __init__(self, settings: Settings, arrays: dict[str, np.ndarray]) -> None:
        self.settings = settings
        put = functools.partial(jax.device_put, device=_device(settings.device))
        self._params = {name[2:]: put(to_jax(x)) for name, x in arrays.items() if name.startswith("p/")}
        inputs, targets = arrays["inputs"], arrays["targets"]
        self._batch = put(inputs.transpose(0, 2, 3, 1) if inputs.ndim == 4 else inputs), put(targets)
        self._model = functools.partial(MODELS[settings.model], **settings.options)
        # torch's defaults
        sgd = settings.optimizer == "SGD"
        self._optimizer = optax.sgd(1e-3, momentum=0.9) if sgd else optax.adamw(1e-4, weight_decay=1e-2)
        self._compiled: dict[str, Any] = {}
        self._states: dict[str, Any] = {}
        self._microbatch: int | None = None

    def clip(self, samples: int) -> dict[str, Any]:
        """The clipped sum of the first samples, with their norms and losses."""
        clipped = self._clipped(1.0, self._microbatch, return_grad_norms=True)
        grads, aux = jax.jit(clipped)(self._params, *(x[:samples] for x in self._batch))
        found = {name: to_torch(np.array(grad)) for name, grad in grads.items()}
        return {"grads": found, "norms": np.array(aux.grad_norms), "losses": np.array(aux.values)}

    def compile(self) -> dict[str, Any]:
        """Compile the plain step, and the private one with the faster of `MICROBATCHES` that fits."""
        seconds, memory = {}, {}
        self._compiled["plain"], seconds["plain"] = _compiled(self._plain, self._start(), self._batch)
        memory["plain"] = _memory(self._compiled["plain"])
        self._states["plain"] = self._start()
        needed, best = [], float("inf")
        for size in MICROBATCHES if len(self._batch[1]) > 1 else MICROBATCHES[:1]:
            private, initial = self._private(size)
            step, took = _compiled(private, initial(), self._batch)
            needed.append(_memory(step)["peak_bytes"])
            if needed[-1] > self.settings.room:
                continue
            self._compiled["private"], self._states["private"] = step, initial()
            taken = min(self.steps("private", 2)["seconds"])
            if taken < best:
                best, chosen, seconds["private"], memory["private"] = taken, (size, step, initial), took, _memory(step)
        if best == float("inf"):
            raise MemoryError(f"jax_privacy's step needs {min(needed):,} bytes, and {self.settings.room:,.0f} are free")
        self._microbatch, self._compiled["private"], initial = chosen
        self._states["private"] = initial()
        return {"microbatch": self._microbatch, "compile_seconds": seconds, "memory": memory}

    def steps(self, which: str, count: int) -> dict[str, Any]:
        """Run steps one after the other; returns the seconds of each, until its results exist, and the last loss."""
        step, seconds, value = self._compiled[which], [], float("nan")
        for _ in range(count):
            state = self._states.pop(which)
            before = time.perf_counter()
            self._states[which], value = jax.block_until_ready(step(state, self._batch))
            seconds.append(time.perf_counter() - before)
        return {"seconds": seconds, "loss": float(value)}

    def _loss(self, params: Any, inputs: Any, targets: Any) -> Any:
        return losses(self._model(params, inputs), targets).mean()

    def _clipped(self, normalize_by: float, microbatch: int | None, **options: Any) -> Any:
        return jax_privacy.clipped_grad(
            self._loss,
            l2_clip_norm=self.settings.max_grad_norm,
            batch_argnums=(1, 2),
            normalize_by=normalize_by,
            return_values=True,
            microbatch_size=microbatch,
            **options,
        )

    def _start(self) -> Any:
        params = jax.tree.map(jnp.copy, self._params)  # a step reuses the memory of its state
        return params, self._optimizer.init(params)

    def _plain(self, state: Any, batch: Any) -> Any:
        params, own = state
        value, grads = jax.value_and_grad(self._loss)(params, *batch)
        updates, own = self._optimizer.update(grads, own, params)
        return (optax.apply_updates(params, updates), own), value

    def _private(self, microbatch: int | None) -> tuple[Callable[..., Any], Callable[[], Any]]:
        """The private step, and a function that makes its first state."""
        clipped = self._clipped(float(len(self._batch[1])), microbatch)
        noise = gaussian_privatizer(stddev=NOISE_MULTIPLIER * clipped.sensitivity(), prng_key=jax.random.key(0))

        def step(state: Any, batch: Any) -> Any:
            params, own, noises = state
            grads, aux = clipped(params, *batch)
            grads, noises = noise.update(grads, noises)
            updates, own = self._optimizer.update(grads, own, params)
            return (optax.apply_updates(params, updates), own, noises), aux.values.mean()

        def initial() -> Any:
            params, own = self._start()
            return params, own, jax.tree.map(jnp.copy, noise.init(params))

        return step, initial


def _device(number: int) -> Any:
    try:
        return jax.devices()[number]
    except Exception as error:  # jax 0.10 without its CUDA plugin raises an AssertionError without words
        wanted = f"device {number} of JAX_PLATFORMS={os.environ.get('JAX_PLATFORMS')}"
        raise RuntimeError(f"cannot initialize backend: {wanted} ({str(error) or type(error).__name__})") from error


def _compiled(step: Callable[..., Any], state: Any, batch: Any) -> tuple[Any, float]:
    """The compiled step, which reuses the memory of its state, and the seconds that tracing and compiling took."""
    before = time.perf_counter()
    compiled = jax.jit(step, donate_argnums=0).lower(state, batch).compile()
    return compiled, time.perf_counter() - before


def _memory(compiled: Any) -> dict[str, Any]:
    """What XLA plans for a step: the record of `dpbench.measure.bench.Memory`."""
    found = compiled.memory_analysis()
    given = int(found.argument_size_in_bytes)
    more = int(found.output_size_in_bytes) - int(found.alias_size_in_bytes) + int(found.temp_size_in_bytes)
    return {"source": "xla", "peak_bytes": given + more, "baseline_bytes": given}


def answer(do: str, more: dict[str, Any]) -> dict[str, Any] | tuple[str, str]:
    """The result of a request, or an error's class and text.

    Args:
        do: "start", or a method of `_Steps`.
        more: its arguments.
    """
    try:
        return _start(**more) if do == "start" else getattr(_STEPS[0], do)(**more)
    except Exception as error:  # one of jax's own could not be read without jax
        return type(error).__name__, str(error) or type(error).__name__


def _start(settings: Settings, arrays: dict[str, np.ndarray]) -> dict[str, Any]:
    if hasattr(os, "sched_setaffinity"):  # XLA has a thread for each CPU that the process may use
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: settings.threads])
    jax.config.update("jax_default_matmul_precision", settings.precision)
    _STEPS.append(_Steps(settings, arrays))
    return {"jax": jax.__version__, "jax_privacy": jax_privacy.__version__}
