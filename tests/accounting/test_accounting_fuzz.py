"""Every accountant anywhere: a number or one line, soon, in little memory; no upper bound below the certified one."""

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
from accounting.sampling import HOME, SCHEMES

ROOT = Path(__file__).resolve().parents[2]
SPECIAL = {
    "sigma": [0.0, 5e-324, 1e-310, 1e-150, 1e-12, 1e-3, 4e-3, 0.01, 1e6, 1e150, 1e300, 1.7e308, math.inf],
    "rate": [0.0, 5e-324, 1e-310, 1e-300, 1e-20, 1e-12, 0.5, 0.999, 1 - 1e-10, 1 - 2**-53, 1.0],
    "steps": [0, 1, 2, 3, 10**9, 10**12, 10**15, 10**18, 2**63, 10**100, 10**300, 10**400],
    "delta": [0.0, 5e-324, 1e-310, 1e-300, 1e-249, 1e-100, 1e-15, 0.5, 0.9, 1 - 1e-10, 1 - 2**-53, 1.0],
}
NUMERICAL = ("prv", "pld", "best", "prv:lower", "prv:estimate", "shuffled")
#: log10 of what is between.
RANGES = {"sigma": (-3, 4), "rate": (-9, 0), "steps": (0, 8), "delta": (-14, 0)}


def points(seed, count):
    """(mechanism, steps, δ), two in three of them under Poisson sampling."""
    rng = random.Random(seed)

    def one(name):
        if rng.random() < 0.3:
            return rng.choice(SPECIAL[name])
        value = 10 ** rng.uniform(*RANGES[name])
        return int(value) if name == "steps" else value

    for number in range(count):
        sigma, q, steps, delta = map(one, RANGES)
        sampling, adjacency = rng.choice(sorted(SCHEMES)) if number % 3 == 2 else HOME
        n, sizes = int(10 ** rng.uniform(0, 7)), {}
        if sampling == "truncated_poisson":
            sizes = {"dataset_size": n, "max_batch_size": max(1, int(n * q * rng.uniform(0.5, 3.5)))}
        yield SubsampledGaussian(sigma, q, sampling, adjacency, **sizes), steps, delta


def check(mechanism, steps, delta):
    """Every accountant has an ε, or one line on why there is none."""
    found, kinds = {}, {}
    for name in (*ACCOUNTANTS, *VARIANTS, "shuffled", "without_replacement"):
        started = time.process_time()
        try:
            answer = load_accountant(name).guarantee(mechanism, steps=steps, delta=delta)
        except NoAnswer as error:
            assert str(error) and "\n" not in str(error)
            continue
        assert answer.epsilon >= 0, (name, answer)  # which NaN is not
        assert quick(time.process_time() - started, 15 if name in NUMERICAL else 2), (name, answer)
        found[name], kinds[name] = answer.epsilon, answer.kind
    assert {"simple", "strong", "moments", "rdp", "best"} <= set(found), mechanism
    lower = max(found[name] for name in kinds if kinds[name] == "lower_bound") if "lower_bound" in kinds.values() else 0
    for name, epsilon in found.items():
        if kinds[name] == "upper_bound":
            assert epsilon >= lower * (1 - 1e-9), (name, mechanism, epsilon, lower)


def fuzz(seed, count):
    for point in points(seed, count):
        check(*point)
    # not ru_maxrss, which a process inherits from the one that started it
    most = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM:"))
    print(json.dumps(int(most.split()[1]) / 1024))


@pytest.mark.parametrize(
    ("seed", "count"), [(0, 12), *(pytest.param(seed, 150, marks=pytest.mark.slow) for seed in range(1, 4))]
)
def test_anywhere(seed, count):
    code = "import sys; sys.path[:0] = ['tests/accounting', 'tests/support']; from test_accounting_fuzz import fuzz; "
    code += f"fuzz({seed}, {count})"
    done = subprocess.run(
        [sys.executable, "-W", "error::RuntimeWarning", "-c", code], capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout.splitlines()[-1]) < 1024  # MiB
