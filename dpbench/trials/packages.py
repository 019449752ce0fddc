"""The packages that models and backends need, by their references alone: worth importing before a trial is forked."""

from __future__ import annotations

from collections.abc import Iterable

from clipping.registry import BACKENDS

#: Scheme of a reference -> modules that a server process can import once, before it forks a trial.
SCHEMES: dict[str, tuple[str, ...]] = {
    "timm": ("timm",),
    "torchvision": ("torchvision",),
    # the first model's module brings what all of them share, which takes longer than transformers itself
    "transformers": ("transformers.models.auto.modeling_auto", "transformers.models.gpt2.modeling_gpt2"),
    "tiny": ("transformers.models.auto.modeling_auto", "transformers.models.gpt2.modeling_gpt2"),
}


def required_modules(ref: str) -> tuple[str, ...]:
    """Modules that are worth importing before a trial with this model is forked; () for built-ins and files.

    Args:
        ref: of a model.
    """
    is_file = (ref.rpartition(":")[0] or ref).endswith(".py")
    return () if is_file else SCHEMES.get(ref.partition(":")[0], ())


def modules_of_backends(names: Iterable[str]) -> tuple[str, ...]:
    """The same of backends: what the rows of `clipping.registry` say.

    Args:
        names: of backends; those of files have no row.
    """
    known = (BACKENDS[name] for name in names if name in BACKENDS)
    return tuple(dict.fromkeys(module for info in known for module in info.modules))
