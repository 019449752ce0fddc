"""Saving figures in processes of their own: the same bytes, and errors that come back."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import matplotlib
import pytest
from matplotlib.figure import Figure

from dpbench.errors import RunEnded
from dpbench.report import style
from dpbench.report.drawing.pictures import save, save_all


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
    save_all([(figure, paths(tmp_path / "2", name)) for name in "abc"], workers=2)
    for name in "abc":
        save(figure, paths(tmp_path / "1", name))
    one, two = (sorted((tmp_path / workers).iterdir()) for workers in "12")
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
    with pytest.raises(OSError, match="No space left on device") as met:
        save_all([(figure, paths(tmp_path))])
    assert met.value.filename == str(tmp_path / "a.png")


def test_a_process_that_is_killed_is_no_success(figure, tmp_path, monkeypatch):
    monkeypatch.setattr(Figure, "savefig", lambda self, path, **options: os.kill(os.getpid(), 9))
    with pytest.raises(RunEnded, match="a process that saved figures was killed"):
        save_all([(figure, paths(tmp_path))])


def test_no_process_outlives_a_report_that_is_killed():
    """Else a reader of its output waits forever."""
    code = """
import time
from dpbench.report.drawing import pictures

def save(*given):
    print("saving", flush=True)
    time.sleep(60)

pictures.save = save
pictures.save_all([(None, {})] * 2, workers=2)
"""
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"saving\n"
    process.kill()
    process.communicate(timeout=20)
