"""Writes ten thousand records, as of a long campaign: searches and steps of every backend, overhead, maps of ε."""

import itertools
import json
import random

from report_records import CPU, GIB, memory, step_result

from dpbench.report import style
from dpbench.trials import EpsilonTrial, MapTrial, OverheadTrial, PeakTrial, StepTrial

MODELS = ["cnn", "resnet18", "resnet34", "resnet50", "vgg11", "vgg13", "vgg16", "vgg19"]
COUNT = 10_000
ACCOUNTANTS = ["moments", "rdp", "gdp", "prv", "pld", "prv:lower"]


def write_many(folder):
    """Write exactly `COUNT` records in two runs; returns the number that failed."""
    folder.mkdir(parents=True)
    lines = list(itertools.islice(_trials(random.Random(0)), COUNT))
    assert len(lines) == COUNT
    for name, part in (("a", lines[: COUNT // 2]), ("b", lines[COUNT // 2 :])):
        head = {"type": "environment", "schema": 2, "run": name, "utc": "2026-01-01T00:00:00Z", "environment": CPU}
        with (folder / f"{name}.jsonl").open("w") as file:
            file.write(json.dumps(head) + "\n")
            for second, (trial, round_, outcome, evidence, result) in enumerate(part):
                line = {"type": "trial", "schema": 2, "experiment": "campaign", "id": trial.id, "round": round_}
                line |= {"fingerprint": "v1", "trial": trial.describe(), "outcome": outcome, "evidence": evidence}
                utc = f"2026-01-0{1 + (name == 'b')}T{second // 3600:02d}:{second // 60 % 60:02d}:{second % 60:02d}Z"
                file.write(json.dumps(line | {"seconds": 1.0, "utc": utc, "load": 0.5, "result": result}) + "\n")
    return sum(outcome not in ("ok", "over_budget") for _, _, outcome, _, _ in lines)


def _trials(chance):
    """Yield (trial, round, outcome, evidence, result): 20 rounds of steps first, points of ε last."""
    cells = list(itertools.product(MODELS, style.BACKENDS))
    for round_, (model, backend) in itertools.product(range(20), cells):
        trial = StepTrial(model=model, backend=backend, batch_size=32)
        if backend == "fastdp":
            yield trial, round_, "unsupported", f"fastDP cannot do {model}, at 0x{round_:x}", None
        else:
            seconds = [0.1 * (1 + list(style.BACKENDS).index(backend)) * chance.uniform(0.9, 1.1) for _ in range(20)]
            yield trial, round_, "ok", None, step_result(seconds)
    for (model, backend), power in itertools.product(cells, range(14)):
        size, fits = 2**power, power < 11
        trial = PeakTrial(model=model, backend=backend, batch_size=size, simulated=True, memory_budget=16 * GIB)
        result = {"memory": memory(size * 2**20, "simulated"), "budget_bytes": 16 * GIB, "parameters": 1}
        yield trial, 0, "ok" if fits else "over_budget", None, result
    for model, round_ in itertools.product(MODELS, range(5)):
        names = list(style.BACKENDS)
        entries = {}
        for number, name in enumerate(names):
            entry = step_result([]) | {"outcome": "ok", "evidence": None}
            turns = [{"round": n, "position": 0, "step_seconds": [0.1 + number / 50] * 3} for n in range(7)]
            entries[name] = entry | {"turns": turns}
        trial = OverheadTrial(model=model, backends=names, batch_size=32)
        yield trial, round_, "ok", None, {"parameters": 1, "backends": entries}
    for accountant, steps in itertools.product(ACCOUNTANTS, range(100, 10_100, 100)):
        trial = EpsilonTrial(accountant=accountant, sample_rate=0.01, noise_multiplier=4.0, delta=1e-5, steps=steps)
        yield trial, 0, "ok", None, _epsilon(accountant, steps)
    axes = ACCOUNTANTS, range(1, 20), (0.5, 0.7, 1.0, 2.0, 4.0), (1e-5, 1e-6), range(1000, 30_000, 1000)
    for accountant, rate, sigma, delta, steps in itertools.product(*axes):
        trial = MapTrial(
            accountant=accountant, sample_rate=rate / 1000, noise_multiplier=sigma, delta=delta, steps=steps
        )
        if accountant == "gdp" and sigma < 0.6:
            yield trial, 0, "unsupported", "no valid bound where σ is below 0.6", None
        else:
            yield trial, 0, "ok", None, _epsilon(accountant, rate * steps / 1000 / sigma)


def _epsilon(accountant, size):
    kind = "lower_bound" if accountant == "prv:lower" else "upper_bound"
    value = size**0.5 / 10 * (1 if kind == "lower_bound" else 1.1 + ACCOUNTANTS.index(accountant) / 50)
    return {"epsilon": value, "kind": kind, "detail": {}, "compute_seconds": 0.01}
