"""``dpbench history``: versions in their order, steps by the rule of ``compare``, and no step from noise."""

import random

import pytest
from report_records import RunFile

from dpbench.records.reader import read
from dpbench.report import history

MIB = 2**20


@pytest.fixture
def versions(tmp_path):
    """Write a version for each ratio (and peak), with some noise; returns the table."""

    def write(ratios, peaks=None, noise=0.003):
        run, chance = RunFile(tmp_path / "in" / "a.jsonl", experiment="overhead"), random.Random(0)
        for number, ratio in enumerate(ratios):
            seconds = [ratio * chance.uniform(1 - noise, 1 + noise) for _ in range(9)]
            memory = {"nonprivate": MIB, "ghost": (peaks or [MIB] * 99)[number]}
            run.overhead("cnn", {"nonprivate": [1.0] * 9, "ghost": seconds}, memory, fingerprint=f"v{9 - number}")
        frame = history.table(read(tmp_path / "in"))
        return frame[frame.backend == "ghost"]

    return write


def steps(frame, quantity="time ratio"):
    own = frame[frame.quantity == quantity]
    assert list(own.number) == sorted(set(own.number))
    return {int(row.number): row.step for row in own.itertuples() if row.step}


def test_a_step_is_found_once_and_later_versions_are_compared_with_it(versions):
    frame = versions([1.5, 1.5, 3.0, 3.0, 1.5])
    assert steps(frame) == {3: "slower", 5: "faster"}
    assert list(frame[frame.quantity == "time ratio"].value) == pytest.approx([1.5, 1.5, 3.0, 3.0, 1.5], rel=0.01)


def test_a_slow_creep_is_a_step_once_it_is_beyond_the_noise(versions):
    found = steps(versions([1.0, 1.015, 1.03, 1.045, 1.06, 1.075]))
    assert list(found.values()) == ["slower"] and min(found) > 2


def test_noise_is_no_step_and_peaks_have_steps_of_their_own(versions):
    frame = versions([1.5] * 6, [MIB, MIB, 2 * MIB, 2 * MIB, 2 * MIB, MIB], noise=0.1)
    assert steps(frame) == {} and steps(frame, "peak") == {3: "larger", 6: "smaller"}


def test_the_command_writes_figure_and_table_for_each_device(versions, tmp_path, dpbench):
    versions([1.5, 3.0])
    code, out, _ = dpbench("history", tmp_path / "in", "--output", tmp_path / "out")
    names = out.split()
    folder = tmp_path / "out" / "cpu-test-cpu-2-cpus"
    assert code == 0 and names == [str(folder / f"history.{end}") for end in ("png", "svg", "pdf", "csv", "md", "tex")]
    assert all((folder / name).stat().st_size for name in names)
    text = (folder / "history.md").read_text()
    assert "slower" in text and "1 step: 1 slower." in text


def test_one_version_is_no_history(versions, tmp_path, dpbench):
    versions([1.5])
    code, _, err = dpbench("history", tmp_path / "in")
    assert code == 2 and "two versions of a cell" in err
