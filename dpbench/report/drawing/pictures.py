"""Saves figures in forked processes, one for each CPU: saving takes most of a report's time.

A fork has the figure already, writes its files and exits.

Functions take:
    figure: to be written.
    paths: suffix -> path.
"""

from __future__ import annotations

import io
import os
import pickle
import signal
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

# before any fork: else each fork would spend a second to import them
from matplotlib.backends import backend_agg, backend_pdf, backend_svg  # noqa: F401
from matplotlib.figure import Figure

from clipping import cache
from dpbench.process.linux import available_cpus

# Pixels an inch, and most pixels of a side: Agg draws no image of 2**16 or more.
_DPI, _TALLEST = 200, 30_000


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


class Pictures:
    """Saves figures; its ``with`` block ends when all are on the disk.

    Args:
        workers: number of processes; 1 is this one.

    Raises:
        OSError: or any other error of a process, raised in this one.
    """

    def __init__(self, workers: int | None = None) -> None:
        self._workers = workers or available_cpus()
        self._running: list[tuple[int, int]] = []

    def __enter__(self) -> Pictures:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            while self._running and kind is None:
                self._wait()
        finally:  # the remaining processes' output is not needed
            for pid, reader in self._running:
                os.close(reader)
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)

    def save(self, figure: Figure, paths: Mapping[str, Path]) -> None:
        """Begin to write the figure; later changes to it are not in the files."""
        if self._workers < 2:
            save(figure, paths)
            return
        while len(self._running) >= self._workers:
            self._wait()
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            _work(figure, paths, writer)
        os.close(writer)
        self._running.append((pid, reader))

    def _wait(self) -> None:
        pid, reader = self._running.pop(0)
        with os.fdopen(reader, "rb") as answer:
            told = answer.read()
        _, status = os.waitpid(pid, 0)
        if told:
            raise pickle.loads(told)  # from our own fork
        if status:
            raise RuntimeError(f"the process that saves pictures ended with {os.waitstatus_to_exitcode(status)}")


def _work(figure: Figure, paths: Mapping[str, Path], writer: int) -> None:
    """The whole life of the fork; sends an error to `writer`. Never returns."""
    try:
        try:
            save(figure, paths)
        except BaseException as error:
            with os.fdopen(writer, "wb") as answer:
                pickle.dump(error, answer)
    finally:
        os._exit(0)
