"""Every accountant anywhere: a number or one line, soon, in little memory; no upper bound below the certified one."""

import itertools
import json
import math
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
from processor import quick

from accounting import ACCOUNTANTS, VARIANTS, NoAnswer, SubsampledGaussian, load_accountant

ROOT = Path(__file__).resolve().parents[2]
NAMES = [*ACCOUNTANTS, *VARIANTS]
SPECIAL = {
    "sigma": [0.0, 5e-324, 1e-310, 1e-150, 1e-12, 1e-3, 4e-3, 0.01, 1e6, 1e150, 1e300, 1.7e308, math.inf],
    "rate": [0.0, 5e-324, 1e-310, 1e-300, 1e-20, 1e-12, 0.5, 0.999, 1 - 1e-10, 1 - 2**-53, 1.0],
    "steps": [0, 1, 2, 3, 10**9, 10**12, 10**15, 10**18, 2**63, 10**100, 10**300, 10**400],
    "delta": [0.0, 5e-324, 1e-310, 1e-300, 1e-249, 1e-100, 1e-15, 0.5, 0.9, 1 - 1e-10, 1 - 2**-53, 1.0],
}
#: log10 of what is between.
RANGES = {"sigma": (-3, 4), "rate": (-9, 0), "steps": (0, 8), "delta": (-14, 0)}


def inputs(seed, count):
    rng = random.Random(seed)

    def one(name):
        if rng.random() < 0.3:
            return rng.choice(SPECIAL[name])
        value = 10 ** rng.uniform(*RANGES[name])
        return int(value) if name == "steps" else value

    for _ in range(count):
        yield tuple(one(name) for name in RANGES)


def answers(sigma, q, steps, delta):
    """name: ε or the reason why there is none; checked on the way."""
    found, kinds = {}, {}
    for name in NAMES:
        started = time.process_time()
        try:
            answer = load_accountant(name).guarantee(SubsampledGaussian(sigma, q), steps=steps, delta=delta)
        except NoAnswer as error:
            assert str(error) and "\n" not in str(error)
            continue
        assert answer.epsilon >= 0, (name, answer)  # which NaN is not
        assert quick(time.process_time() - started, 15), (name, answer)
        found[name], kinds[name] = answer.epsilon, answer.kind
    assert {"simple", "strong", "moments", "rdp", "gdp", "best"} <= set(found)
    lower = found.get("prv:lower", 0.0)
    for name, epsilon in found.items():
        if kinds[name] == "upper_bound":
            assert epsilon >= lower * (1 - 1e-12), (name, epsilon, lower)
    return found


def fuzz(seed, count):
    for point in inputs(seed, count):
        answers(*point)
    # not ru_maxrss, which a process inherits from the one that started it
    most = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM:"))
    print(json.dumps(int(most.split()[1]) / 1024))


def in_a_process(seed, count):
    code = "import sys; sys.path[:0] = ['tests/accounting', 'tests/support']; from test_accounting_fuzz import fuzz; "
    code += f"fuzz({seed}, {count})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout.splitlines()[-1]) < 1024  # MiB


def test_a_few_of_the_domain():
    in_a_process(0, 5)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 6))
def test_five_hundred_of_the_domain(seed):
    in_a_process(seed, 100)


GRID = list(
    itertools.product(
        (0.4, 0.7, 1.0, 2.0, 8.0),
        (1e-5, 1e-3, 0.01, 0.1, 0.5, 1.0),
        (1, 30, 1000, 10_000, 100_000),
        (1e-10, 1e-5, 1e-2, 0.3),
    )
)


ABSURD = [
    *[(1e-3, 0.01, 10_000, 1e-5), (1e6, 0.01, 10_000, 1e-5), (1.0, 0.01, 10**9, 1e-5), (1.0, 1.0, 1000, 1e-5)],
    *[(1.0, 1e-12, 1000, 1e-5), (1.0, 0.01, 1000, 1e-300), (1e-3, 1.0, 10**9, 1e-300)],
]
USUAL = [(1.1, 256 / 60_000, 3000, 1e-5), (3.0, 0.1, 512, 1e-6), (2.0, 0.5, 20, 1e-3), (5.0, 1.0, 25, 1e-5)]


def test_the_absurd_and_some_points():
    for point in (*ABSURD, *USUAL, (0.6, 0.2, 1, 1e-5), *random.Random(5).sample(GRID, 3)):
        answers(*point)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(12))
def test_six_hundred_points(part):
    assert len(GRID) == 600
    for point in GRID[part::12]:
        answers(*point)
