"""Lists popular models, and defines the trial that finds the backends that are exact on each.

The list comes from the sources of the installed libraries, without importing them (and torch with them): the functions
that timm and torchvision register, and transformers' mappings from model type to class. This module names no models
itself, so a new version of a library adds its new models.
"""

import ast
import importlib.util
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from dpbench.models.tiny_config import HEADS
from dpbench.trials import STEP_SOURCES, Trial
from dpbench.trials.packages import modules_of_backends, required_modules

#: The table's names for the tasks of image models, and of mixtures of experts: in one kernel, or one by one.
IMAGES, KERNEL, LOOP = "image classification", "mixture of experts, one kernel", "mixture of experts, in a loop"
#: Option in the reference of a mixture of experts: one expert after the other.
EAGER = "?experts_implementation=eager"
#: Head of `dpbench.models.tiny` -> the table's name for its task.
TASKS = {
    "causal": "causal language model",
    "masked": "masked language model",
    "sequence": "text classification",
    "seq2seq": "sequence to sequence",
    "image": IMAGES,
    "audio": "audio classification",
    "ctc": "speech recognition (CTC)",
}
#: Suffix of a backend's name: its steps run as traced programs (`clipping.program.graphs`).
COMPILED = ":compiled"
#: Results of a backend on a model that builds.
STATUSES = ("exact", "refused", "wrong", "crash", "unavailable")
_FOLDERS = "SPECIAL_MODEL_TYPE_TO_MODULE_NAME"
_REGISTERED = re.compile(r"^@register_model\b[^\n]*\n(?:@[^\n]*\n|\)[^\n]*\n|    [^\n]*\n)*def (\w+)\(", re.MULTILINE)
#: Words in a model's name, from the smallest size to the largest; "" stands for names without one.
_SIZES = (
    *(("test",), ("atto", "nano"), ("femto", "pico"), ("xxs", "xxtiny", "xx"), ("xs",), ("tiny", "ti", "t")),
    *(("mini", "small", "s"), (), ("base", "b"), ("medium", "m"), ("large", "l"), ("xlarge", "xl", "huge", "h")),
    ("giant", "g"),
)
_RANK = {word: rank for rank, words in enumerate(_SIZES) for word in words}
#: Families with more than 80 million parameters in the smallest model, because of its depth.
_SHALLOW = ("beit", "deepseek_vit", "gemma4_vit", "qwen3_vit", "naflexvit", "vision_transformer_sam")


@dataclass(frozen=True, kw_only=True)
class CoverageTrial(Trial):
    """Runs each of `backends` on one model, built once: exact, refused, wrong or crashed; or why it does not build.

    Uses float64 if the model trains in it, else float32. The backends verify nothing themselves. `image_size` None: the
    smallest that the model takes.
    """

    kind: ClassVar[str] = "coverage"
    body: ClassVar[str] = "dpbench.measure.coverage:run"
    sources: ClassVar[tuple[str, ...]] = (*STEP_SOURCES, "dpbench/conformance/**/*.py")
    alone: ClassVar[bool] = False
    model: str
    task: str
    backends: Sequence[str]
    batch_size: int = 3
    image_size: int | None = None
    device: str = "cpu"
    seed: int = 0
    timeout: float = 300.0

    def modules(self) -> tuple[str, ...]:
        backends = [name.removesuffix(COMPILED) for name in self.backends]
        return ("torch", *required_modules(self.model), *modules_of_backends(backends))


def models() -> list[tuple[str, str]]:
    """(reference, task) of every model of the sweep, for the installed libraries."""
    types, with_experts = list(transformers_types()), set(mixtures())
    return [
        *((ref, IMAGES) for package in ("timm", "torchvision") for ref in smallest(package)),
        *((f"tiny:{of[0]}/{of[1]}", KERNEL if of in with_experts else TASKS[of[0]]) for of in types),
        *((f"tiny:{of[0]}/{of[1]}{EAGER}", LOOP) for of in types if of in with_experts),
    ]


def smallest(package: str) -> Iterator[str]:
    """The reference of the smallest classification model in each of a library's families (modules).

    Args:
        package: timm or torchvision.
    """
    for path in _sources(package, "models/*.py"):
        if names := _REGISTERED.findall(path.read_text()):
            yield f"{package}:{min(names, key=size_of)}{'?depth=2' if path.stem in _SHALLOW else ''}"


def transformers_types() -> Iterator[tuple[str, str]]:
    """(head, model type) of each of transformers' mappings of `HEADS`."""
    found = _literals("models/auto/modeling_auto.py", {mapping for mapping, _ in HEADS.values()})
    for head, (mapping, _) in HEADS.items():
        for kind, _ in found.get(mapping, ()):
            yield head, kind


def mixtures() -> Iterator[tuple[str, str]]:
    """(head, model type) of mixtures of experts that have an option to run one expert after the other.

    By default these multiply the rows of all experts in one kernel.
    """
    folder_of = dict(_literals("models/auto/auto_mappings.py", {_FOLDERS}).get(_FOLDERS, ()))
    sources = _sources("transformers", "models/*/modeling_*.py")
    folders = {path.parent.name for path in sources if "@use_experts_implementation" in path.read_text()}
    for head, kind in transformers_types():
        if folder_of.get(kind, kind.replace("-", "_")) in folders:
            yield head, kind


def size_of(name: str) -> tuple[int, tuple[int, ...], str]:
    """A sort key for models of a family: the size word in the name, its numbers, the name.

    Args:
        name: of a model.
    """
    words = re.findall(r"[a-z]+|\d+", name)
    rank = min((_RANK[word] for word in words if word in _RANK), default=_SIZES.index(()))
    return rank, tuple(int(word) for word in words if word.isdecimal()), name


def _literals(path: str, names: set[str]) -> dict[str, Sequence[tuple[str, Any]]]:
    """Name -> the pairs of ``name = OrderedDict([...])`` in a file of transformers."""
    return {
        node.targets[0].id: ast.literal_eval(node.value.args[0])
        for source in _sources("transformers", path)
        for node in ast.parse(source.read_text()).body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id in names
        if isinstance(node.value, ast.Call) and node.value.args
    }


def _sources(package: str, pattern: str) -> list[Path]:
    """The files of an installed package; [] if it is not installed."""
    spec = importlib.util.find_spec(package)
    folders = spec.submodule_search_locations if spec else None
    return sorted(Path(folders[0]).glob(pattern)) if folders else []
