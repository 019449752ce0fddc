"""Adapter of fastDP: book-keeping (arXiv:2210.00038), as published by its authors.

One backward pass ("MixOpt"). Where 2T² ≤ pd it uses the ghost norm and a second product for the weighted gradient, else
it keeps and reduces per-sample gradients. Its hooks compute the factors, so only its clipping functions work: flat,
automatic, and each of them per parameter. Autograd computes weight gradients of the origins only (`origin_params` of
fastDP): the embeddings, or the first layer. If another layer does not depend on the first one's output, it computes all
weight gradients.
"""

import importlib
from collections.abc import Iterable
from typing import Any
from unittest import mock

from torch import Tensor, nn

from clipping.core.clip_functions import Automatic, Flat, PerLayer
from clipping.core.types import ClippedGradient, Parameters, Problem, UnsupportedModel
from clipping.peers.base import Peer, Step, norms_of

CLIPPING: dict[type, tuple[str, str]] = {
    Flat: ("Abadi", "all-layer"),
    Automatic: ("automatic", "all-layer"),
    PerLayer: ("Abadi", "param-wise"),
}
"""Our clipping functions -> its `clipping_fn` and `clipping_style`."""


def engine_of(model: nn.Module, **options: Any) -> Any:
    """fastDP's engine, without its own forward passes for models of transformers, which end in a TypeError since 5.0.

    Those passes give each sample its own position ids, as ``positions=true`` in a model's reference does.
    """
    support = importlib.import_module("fastDP.transformers_support")
    with mock.patch.object(support, "forward_swapper", lambda module: None):
        return importlib.import_module("fastDP").PrivacyEngine(model, **options)


def beyond_origin(model: nn.Module) -> list[nn.Parameter]:
    """The trained parameters except the origins: the embeddings, or else one parameter of the first layer.

    fastDP matches `origin_params` with parts of names, so ``conv1`` would match a parameter of every block.
    """
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    origins = {id(p) for m in model.modules() if isinstance(m, nn.Embedding) for p in m.parameters()}
    if not origins.intersection(map(id, trained.values())):
        layer = next(iter(trained)).rpartition(".")[0]
        first = [p for name, p in trained.items() if name.rpartition(".")[0] == layer]
        origins = {id(min(first, key=Tensor.numel))}
    return [p for p in trained.values() if id(p) not in origins]


class FastDP(Peer):
    """`PrivacyEngine(clipping_mode="MixOpt")` without noise. Reads `private_grad`; runs no optimiser step."""

    name = "fastdp"
    library = "fastDP"
    package = "fastDP"
    install = "clone awslabs/fast-differential-privacy from GitHub and put it on PYTHONPATH"
    captured = ("activations", "backprops", "use_gc")
    _by_origin = True

    def problems(self) -> Iterable[Problem]:
        yield from super().problems()
        if type(self.clip) not in CLIPPING:
            known = ", ".join(function.__name__ for function in CLIPPING)
            yield Problem("clip", f"fastDP's hooks cannot express {self.clip!r}", f"use one of {known}")
        elif self.clip.sensitivity == 0 or (isinstance(self.clip, Automatic) and not self.clip.stabiliser):
            yield Problem("clip", f"fastDP's {self.clip!r} is 0/0 at a norm of zero", "use a stabiliser, and C > 0")

    def _attach(self, parameters: Parameters) -> Any:
        function, style = CLIPPING[type(self.clip)]
        layers = importlib.import_module(f"{self.package}.supported_layers_grad_samplers")
        known = layers._supported_layers_norm_sample_AND_clipping
        if not any(type(m) in known and any(p.requires_grad for p in m.parameters()) for m in self.model.modules()):
            self._owed(parameters, "hook: there is no layer of a type that it knows")
        engine = engine_of(
            self.model,
            batch_size=1,
            sample_size=2,
            epochs=1,
            max_grad_norm=self.clip.max_grad_norm,  # type: ignore[attr-defined]
            noise_multiplier=0.0,
            clipping_mode="MixOpt",
            clipping_fn=function,
            clipping_style=style,
            numerical_stability_constant=self.clip.stabiliser,  # type: ignore[attr-defined]
            loss_reduction="sum",
        )
        for p in self.model.parameters():
            p.noise = 0.0  # type: ignore[attr-defined]  # 0·C is NaN for C = inf
        return engine

    def _clipped(self, parameters: Parameters, inputs: Any, targets: Any, batch_size: int) -> ClippedGradient:
        try:
            return super()._clipped(parameters, inputs, targets, batch_size)
        except UnsupportedModel:
            if not self._by_origin:
                raise
        self._by_origin = False  # some layer is not computed from the first one's output
        return super()._clipped(parameters, inputs, targets, batch_size)

    def _step(self, parameters: Parameters, inputs: Any, targets: Any, batch_size: int) -> Step:
        hooks: Any = importlib.import_module(f"{self.package}.autograd_grad_sample")
        clip = hooks._per_block_clip_grad
        norms: dict[str, Tensor] = {}

        def seen(*args: Any, **kwargs: Any) -> None:
            norms.update((name, p.norm_sample) for name, p in parameters.items() if hasattr(p, "norm_sample"))
            clip(*args, **kwargs)

        held = beyond_origin(self.model) if self._by_origin else []
        hooks._per_block_clip_grad = seen  # its hooks call this; they delete the norms before returning
        try:
            for p in held:
                p.requires_grad_(False)
            losses = self.losses(inputs, targets, batch_size)
            losses.sum().backward()
        finally:
            hooks._per_block_clip_grad = clip
            for p in held:
                p.requires_grad_(True)
        grads = {name: p.private_grad for name, p in parameters.items() if hasattr(p, "private_grad")}
        owed = (n for n, p in parameters.items() if (held or p.grad is not None) and n not in grads)
        self._owed(owed, "clipped gradient")
        self._owed([name for name, norm in norms.items() if norm.shape != losses.shape], f"norms [{batch_size}]")
        return Step(grads, norms_of(norms.values(), losses), losses.detach())

    def _route(self, module: nn.Module, name: str) -> str:
        ghost = getattr(module, "use_gc", isinstance(module, nn.Embedding))
        return "ghost" if ghost and name == "weight" else "instantiated"
