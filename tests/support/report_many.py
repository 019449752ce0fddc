"""Writes ten thousand records, as of a long campaign: steps and searches of every backend, overhead, maps of ε."""

import itertools
import random

from report_records import RunFile

from dpbench.report import style
from dpbench.trials import MapTrial, StepTrial

MODELS = ["cnn", "resnet18", "resnet34", "resnet50", "vgg11", "vgg13", "vgg16", "vgg19"]
COUNT = 10_000
ACCOUNTANTS = ["moments", "rdp", "gdp", "prv", "pld", "prv:lower"]


def write_many(folder):
    """Write exactly `COUNT` records in two runs; returns the number that failed."""
    chance, failed = random.Random(0), 0
    run = RunFile(folder / "a.jsonl", experiment="campaign")
    for round_, model, (place, backend) in itertools.product(range(20), MODELS, enumerate(style.BACKENDS, 1)):
        if backend == "fastdp":
            failed += 1
            trial, said = StepTrial(model=model, backend=backend, batch_size=32), f"cannot do {model}, at 0x{round_:x}"
            run.add(trial, None, "unsupported", round_, evidence=said)
        else:
            seconds = [0.1 * place * chance.uniform(0.9, 1.1) for _ in range(20)]
            run.step(model, backend, seconds, batch_size=32, round=round_)
    for model, backend in itertools.product(MODELS, style.BACKENDS):
        run.search(model, backend, [2**n for n in range(11)], [2**n for n in range(11, 14)])
    for model, round_ in itertools.product(MODELS, range(5)):
        turns = {name: [0.1 + place / 50] * 7 for place, name in enumerate(style.BACKENDS)}
        run.overhead(model, turns, batch_size=32, round=round_)

    points = RunFile(folder / "b.jsonl", experiment="campaign", start=600)
    for accountant, steps in itertools.product(ACCOUNTANTS, range(100, 10_100, 100)):
        found = _epsilon(accountant, steps)
        points.epsilon(accountant, steps, found["epsilon"], found["kind"])
    written = sum(len(each.path.read_text().splitlines()) - 1 for each in (run, points))
    axes = ACCOUNTANTS, range(1, 20), (0.5, 0.7, 1.0, 2.0, 4.0), (1e-5, 1e-6), range(1000, 30_000, 1000)
    for accountant, rate, sigma, delta, steps in itertools.islice(itertools.product(*axes), COUNT - written):
        point = {"sample_rate": rate / 1000, "noise_multiplier": sigma, "delta": delta, "steps": steps}
        trial = MapTrial(accountant=accountant, **point)
        if accountant == "gdp" and sigma < 0.6:
            failed += 1
            points.add(trial, None, "unsupported", evidence="no valid bound where σ is below 0.6")
        else:
            points.add(trial, _epsilon(accountant, rate * steps / 1000 / sigma))
    return failed


def _epsilon(accountant, size):
    kind = "lower_bound" if accountant == "prv:lower" else "upper_bound"
    value = size**0.5 / 10 * (1 if kind == "lower_bound" else 1.1 + ACCOUNTANTS.index(accountant) / 50)
    return {"epsilon": value, "kind": kind, "detail": {}, "compute_seconds": 0.01}
