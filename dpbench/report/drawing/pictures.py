"""Saves figures in forked processes, one for each CPU: saving takes most of a report's time.

A fork has the figure already, writes its files and exits.

Functions take:
    figure: to be written.
    paths: suffix -> path.
"""

from __future__ import annotations

import contextlib
import io
import multiprocessing
from collections.abc import Mapping
from multiprocessing.connection import Connection
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any

# before any fork: else each fork would spend a second to import them
from matplotlib.backends import backend_agg, backend_pdf, backend_svg  # noqa: F401
from matplotlib.figure import Figure

from clipping import cache
from dpbench.process.linux import available_cpus

# Pixels an inch, and most pixels of a side: Agg draws no image of 2**16 or more.
_DPI, _TALLEST = 200, 30_000
_FORKS = multiprocessing.get_context("fork")


def save(figure: Figure, paths: Mapping[str, Path]) -> None:
    """Write the figure as PNG, SVG and PDF.

    PNG and PDF take four times as long as SVG: if the same SVG exists already, byte for byte, they are kept.
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


class Pictures(contextlib.AbstractContextManager["Pictures"]):
    """Saves figures; its ``with`` block ends when all are on the disk.

    Args:
        workers: number of processes; 1 is this one.

    Raises:
        OSError: or any other error of a process, raised in this one.
    """

    def __init__(self, workers: int | None = None) -> None:
        self._workers = workers or available_cpus()
        self._running: list[tuple[ForkProcess, Connection]] = []

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        try:
            while self._running and kind is None:
                self._wait()
        finally:  # the remaining processes' output is not needed
            for process, _ in self._running:
                process.kill()
                process.join()

    def save(self, figure: Figure, paths: Mapping[str, Path]) -> None:
        """Begin to write the figure; later changes to it are not in the files."""
        if self._workers < 2:
            save(figure, paths)
            return
        while len(self._running) >= self._workers:
            self._wait()
        reader, writer = _FORKS.Pipe(duplex=False)
        process = _FORKS.Process(target=_work, args=(figure, paths, writer))
        process.start()
        writer.close()
        self._running.append((process, reader))

    def _wait(self) -> None:
        process, reader = self._running.pop(0)
        error: BaseException | None = None
        with reader, contextlib.suppress(EOFError):  # it sends nothing but an error
            error = reader.recv()
        process.join()
        if error is not None:
            raise error
        if process.exitcode:
            raise RuntimeError(f"the process that saves pictures ended with {process.exitcode}")


def _work(figure: Figure, paths: Mapping[str, Path], writer: Connection) -> None:
    """The whole life of the fork; sends an error to `writer`."""
    try:
        save(figure, paths)
    except BaseException as error:
        writer.send(error)
