"""Saving figures in processes of their own: the same bytes, errors that come back, and nobody left behind."""

import errno
import multiprocessing
import os
import time
from pathlib import Path

import matplotlib
import pytest
from bodies import FOREVER
from matplotlib.figure import Figure

from dpbench.report import style
from dpbench.report.drawing.pictures import Pictures, save


@pytest.fixture
def figure():
    with matplotlib.rc_context(style.RC):
        drawn = Figure(figsize=(2, 1))
        drawn.text(0.1, 0.5, "words")
        yield drawn


def paths(folder, name="a"):
    folder.mkdir(exist_ok=True)
    return {suffix: folder / f"{name}.{suffix}" for suffix in ("png", "svg", "pdf")}


def test_several_processes_write_what_one_does(figure, tmp_path):
    for workers in (1, 2):
        with Pictures(workers) as pictures:
            for name in "abc":
                pictures.save(figure, paths(tmp_path / str(workers), name))
            figure.texts[0].set_text("words")
    one, two = (sorted((tmp_path / str(workers)).iterdir()) for workers in (1, 2))
    assert [path.name for path in one] == [path.name for path in two] and len(one) == 9
    assert all(first.read_bytes() == second.read_bytes() for first, second in zip(one, two, strict=True))
    assert one[0].stat().st_size > 500


def test_pictures_are_drawn_again_only_if_the_svg_changes(figure, tmp_path):
    files = paths(tmp_path)
    save(figure, files)
    first = {suffix: path.read_bytes() for suffix, path in files.items()}
    files["png"].write_bytes(b"kept")
    save(figure, files)
    assert files["png"].read_bytes() == b"kept"
    figure.texts[0].set_text("other words")
    save(figure, files)
    assert all(path.read_bytes() not in (first[suffix], b"kept") for suffix, path in files.items())
    files["pdf"].unlink()
    save(figure, files)
    assert files["pdf"].read_bytes() and files["png"].read_bytes() != b"kept"


def test_what_a_process_met_is_raised_where_the_report_is_made(figure, tmp_path, monkeypatch):
    def full(self, target):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(OSError, match="No space left on device") as met, Pictures(2) as pictures:
        pictures.save(figure, paths(tmp_path))
    assert met.value.filename == str(tmp_path / "a.png")
    assert multiprocessing.active_children() == []


def test_a_process_that_is_killed_is_no_success(figure, tmp_path, monkeypatch):
    monkeypatch.setattr(Figure, "savefig", lambda self, path, **options: os.kill(os.getpid(), 9))
    with pytest.raises(RuntimeError, match="ended with -9"), Pictures(2) as pictures:
        pictures.save(figure, paths(tmp_path))
    assert multiprocessing.active_children() == []


def test_an_error_elsewhere_ends_the_processes(figure, tmp_path, monkeypatch):
    monkeypatch.setattr(Figure, "savefig", lambda self, path, **options: time.sleep(FOREVER))
    with pytest.raises(KeyError), Pictures(2) as pictures:
        pictures.save(figure, paths(tmp_path))
        raise KeyError("elsewhere")
    assert multiprocessing.active_children() == []
