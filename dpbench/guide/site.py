"""Builds the documentation: `make docs` runs `python -m dpbench.guide.site build/docs`.

pdoc renders two sites: the guide and the public interface, with a search; and under `internal/` all other modules,
without a search. Pages load nothing from the network, so formulas between dollar signs become pictures. The memory
picture shows simulated steps.
"""

import importlib
import pkgutil
import re
import sys
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import matplotlib
import pdoc.doc
import pdoc.render
import torch
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.mathtext import math_to_image
from torch._subclasses.fake_tensor import FakeTensorMode

from clipping import Flat, load_backend
from clipping.core.microbatching import taken_by
from dpbench.measure.simulate import LastForAll, StorageLifetimes
from dpbench.models.loading import load_workload
from dpbench.report import style

#: Page -> its title, in the order of the menu.
GUIDE = {
    "dpbench.guide": "Start here",
    "dpbench.guide.algorithms": "The algorithms",
    "dpbench.guide.engine": "The engine",
    "dpbench.guide.backends": "Backends",
    "dpbench.guide.accountants": "Accountants",
    "dpbench.guide.experiments": "Experiments",
    "dpbench.integrations.sharp_edges": "Sharp edges",
}
TUTORIALS = {
    "dpbench.integrations.tutorials.digits": "A vision model, by Lightning",
    "dpbench.integrations.tutorials.from_opacus": "From Opacus",
    "dpbench.integrations.tutorials.memorisation": "What a language model keeps",
    "dpbench.integrations.tutorials.user_level": "Protect a person",
}
PUBLIC = (
    "accounting",
    "clipping",
    "dpbench",
    "dpbench.engine",
    "dpbench.experiment",
    "dpbench.integrations",
    "dpbench.integrations.huggingface",
    "dpbench.integrations.lightning",
    "dpbench.integrations.opacus",
    "dpbench.models",
    "dpbench.trials",
)
_FORMULA = re.compile(r"(?<=\n\n)\$\$([^$]+)\$\$(?=\n\n)|\$\$([^$]+)\$\$")
#: A test's name; too long for its table column, so `render` allows breaks in it.
_TEST = re.compile(r"<code>test_\w+</code>")
#: Parts of a step: positions on the x axis of the memory picture.
_ACROSS = [part / 300 for part in range(300)]
#: Panels of the memory picture. The first is also drawn in all others.
_SHOWN = ("nonprivate", "vmap", "fastgradclip", "ghost", "mixed_ghost", "bk_mixed")


class _Timeline(StorageLifetimes):
    """Bytes alive after each operation of a step, in `line`."""

    def __init__(self) -> None:
        super().__init__()
        self.line: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        self.line.append(self.alive)
        return result


def _timeline(backend: str) -> tuple[list[float], float]:
    """Memory of a step under fake tensors: (MiB by part of the step, share of its operations before the losses).

    The step, of ResNet18 on 32 images, is cut into 300 parts. The memory of a part is its peak, less what was alive
    before the step.
    """
    with (
        FakeTensorMode(allow_non_fake_inputs=True),
        _Timeline() as seen,
        taken_by(LastForAll(seen)),
        torch.autograd.set_multithreading_enabled(False),
    ):
        workload = load_workload("resnet18", data="synthetic")
        batch = workload.batch(32)
        marks: list[int] = []

        def loss_fn(outputs: Any, targets: Any) -> torch.Tensor:
            losses = workload.loss_fn(outputs, targets)
            marks.append(len(seen.line))
            return losses

        with load_backend(backend)(workload.model, loss_fn, clip=Flat(1.0), verify=False) as opened:
            before, seen.line = seen.alive, []
            opened(*batch)
    ends = [round(share * len(seen.line)) for share in _ACROSS] + [len(seen.line)]
    most = [(max(seen.line[a : b + 1]) - before) / 2**20 for a, b in pairwise(ends)]
    return most, marks[0] / len(seen.line)


def _memory_picture(path: Path) -> None:
    """Draw memory against the operations of a step, one panel for each backend."""
    found = {name: _timeline(name) for name in _SHOWN}
    with matplotlib.rc_context(style.RC):
        figure = Figure(figsize=(9.4, 4.6), layout="constrained")
        panels = figure.subplots(2, 3, sharey=True).ravel()
        for axes, (name, (line, losses)) in zip(panels, found.items(), strict=True):
            look = style.backend(name)
            axes.fill_between(_ACROSS, line, color=look.color, alpha=0.2, linewidth=0)
            axes.plot(_ACROSS, found["nonprivate"][0], color=style.FAINT, linewidth=0.8)
            axes.plot(_ACROSS, line, color=look.color, linewidth=1.2)
            axes.set_title(f"{look.name}: peak {max(line):,.0f} MiB", fontsize=9)
            axes.axvline(losses, color=style.INK, linewidth=0.8, linestyle=(0, (3, 3)))
            axes.set_xticks([losses / 2, (1 + losses) / 2], ["forward", "backward"], fontsize=8)
            axes.tick_params(length=0)
            axes.set_yscale("asinh", linear_width=100)
            axes.set_yticks([0, 100, 300, 1000], ["0", "100", "300", "1,000"])
        for axes in panels[::3]:
            axes.set_ylabel("MiB")
        figure.supxlabel("operations of one step, from left to right: ResNet18, 32 images", fontsize=8)
        figure.savefig(path, metadata={"Date": None, "Creator": None})


def _with_formulas(text: str, folder: Path, name: str) -> str:
    """Replace formulas by pictures, with the formula as alternative text, and write them beside the page `name`.

    A formula in its own paragraph is displayed, others are inline.
    """
    count = 0

    def picture(found: re.Match[str]) -> str:
        nonlocal count
        count += 1
        formula = " ".join((found[1] or found[2]).split())
        path = folder / f"{name}-{count}.svg"
        with matplotlib.rc_context({"mathtext.fontset": "cm", "svg.hashsalt": "dpbench"}):
            depth = math_to_image(f"${formula}$", path, format="svg", prop=FontProperties(size=12.5))
        look = f'class="{"display" if found[1] else "inline"}" style="vertical-align: -{depth:.1f}pt"'
        return f'<img {look} src="{path.name}" alt="{formula}">'

    return _FORMULA.sub(picture, text)


def _render(names: Sequence[str], output: Path, **settings: Any) -> None:
    """Write one site: a page for each module, an index, and optionally a search."""
    pages: Mapping[str, pdoc.doc.Module] = {name: pdoc.doc.Module(importlib.import_module(name)) for name in names}
    pdoc.render.configure(docformat="google", template_directory=Path(__file__).parent, **settings)
    sheets = ("resources/bootstrap-reboot.min", "syntax-highlighting", "theme", "layout", "content", "custom")
    style_sheet = "\n".join(pdoc.render.env.get_template(f"{sheet}.css").render() for sheet in sheets)
    output.mkdir(parents=True, exist_ok=True)
    (output / "style.css").write_text(style_sheet, encoding="utf-8")  # a copy in each page would double the site
    for name, page in pages.items():
        path = output / f"{name.replace('.', '/')}.html"
        path.parent.mkdir(parents=True, exist_ok=True)
        text = _TEST.sub(lambda found: found[0].replace("_", "_<wbr>"), pdoc.render.html_module(page, pages))
        path.write_text(text, encoding="utf-8")
    (output / "index.html").write_text(pdoc.render.html_index(pages), encoding="utf-8")
    if search := pdoc.render.search_index(pages):
        (output / "search.js").write_text(search, encoding="utf-8")


def _modules() -> list[str]:
    """Names of all modules except `__main__`."""
    packages = [importlib.import_module(name) for name in ("accounting", "clipping", "dpbench")]
    found = [
        each.name for package in packages for each in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
    ]
    return [name for name in found if not name.endswith(".__main__")]


def build(output: Path) -> Path:
    """Write both sites, and return the path of the first page.

    Args:
        output: folder; files there are overwritten.
    """
    lazy: list[ModuleType] = [importlib.import_module(name) for name in ("clipping", "dpbench")]
    for package in lazy:
        for name in package.__all__:
            setattr(package, name, getattr(package, name))  # pdoc does not see lazy imports
    folder = output / "dpbench" / "guide"
    folder.mkdir(parents=True, exist_ok=True)
    _memory_picture(folder / "memory.svg")
    for name in GUIDE:
        page = importlib.import_module(name)
        page.__doc__ = _with_formulas(page.__doc__ or "", folder, name.rpartition(".")[2])
    pdoc.render.env.globals.update(guide=GUIDE, tutorials=TUTORIALS, public=PUBLIC)
    shown = [*GUIDE, *TUTORIALS, *PUBLIC]
    _render(shown, output, search=True, show_source=True)
    internal = [name for name in _modules() if name not in shown]
    _render(internal, output / "internal", search=False, show_source=False)
    return output / "index.html"


if __name__ == "__main__":
    print(build(Path(sys.argv[1])))
