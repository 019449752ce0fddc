"""Saves figures in forked processes, one for each CPU: saving takes most of a report's time."""

import io
import multiprocessing
import os
import signal
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

# before any fork: else each fork would spend a second to import them
from matplotlib.backends import backend_agg, backend_pdf, backend_svg  # noqa: F401
from matplotlib.figure import Figure

from clipping import cache
from dpbench.errors import RunEnded
from dpbench.process.linux import available_cpus, die_with_parent

# Pixels an inch, and most pixels of a side: Agg draws no image of 2**16 or more.
_DPI, _TALLEST = 200, 30_000
#: In a forked process: the figures to save. A fork has them already, and many cannot be pickled.
_drawn: list[tuple[Figure, Mapping[str, Path]]] = []


def save(figure: Figure, paths: Mapping[str, Path]) -> None:
    """Write the figure as PNG, SVG and PDF.

    PNG and PDF take four times as long as SVG: if the same SVG exists already, byte for byte, they are kept.

    Args:
        figure: to be written.
        paths: suffix -> path.
    """
    sharpness = min(_DPI, _TALLEST / figure.get_figheight())
    # No version and no date in the files: they would change without new measurements.
    options: dict[str, dict[str, Any]] = {
        "svg": {"metadata": {"Date": None, "Creator": None}},
        "png": {"dpi": sharpness, "metadata": {"Software": None}},
        "pdf": {"metadata": {"CreationDate": None, "Creator": None, "Producer": None}},
    }
    pictures = {}
    for suffix, given in options.items():
        drawn = io.BytesIO()
        figure.savefig(drawn, format=suffix, **given)
        pictures[suffix] = drawn.getvalue()
        there = suffix == "svg" and all(path.is_file() for path in paths.values())
        if there and paths[suffix].read_bytes() == pictures[suffix]:
            return
    for suffix in ("png", "pdf", "svg"):  # the SVG last: it shows that the others are complete
        cache.replace(paths[suffix], pictures[suffix], mode=0o666)


def save_all(drawn: Sequence[tuple[Figure, Mapping[str, Path]]], workers: int | None = None) -> None:
    """Save each figure to its paths; an error of a process is raised here.

    Args:
        drawn: figures, each with its paths.
        workers: number of processes; None for one a CPU.

    Raises:
        RunEnded: a process was killed.
    """
    if not drawn:
        return
    fork = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(workers or available_cpus(), fork, _begin, (os.getpid(), drawn)) as pool:
        try:
            list(pool.map(_save, range(len(drawn))))
        except BrokenProcessPool as error:
            raise RunEnded("a process that saved figures was killed, perhaps because the memory was full") from error


def _begin(parent: int, drawn: Sequence[tuple[Figure, Mapping[str, Path]]]) -> None:
    die_with_parent(parent, signal.SIGKILL)  # else it waits for work forever, and holds the command's output open
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends the processes
    _drawn.extend(drawn)


def _save(index: int) -> None:
    save(*_drawn[index])
