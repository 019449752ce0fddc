"""The figures of accounting: every kind told apart, numbers in sight, failures named, nothing cut off."""

import itertools

import pytest
from drawn import assert_apart, draw
from matplotlib.collections import PolyCollection

from accounting.membership import TradeOff
from dpbench.report import FIGURES
from dpbench.report.drawing import trade_off_plot
from dpbench.trials import CalibrationTrial, EpsilonTrial, MapTrial, SchemeTrial, SweepTrial, TunedTrial

POINT = {"sample_rate": 0.01, "noise_multiplier": 4.0, "steps": 10_000, "delta": 1e-5}
FACTORS = {"moments": 1.33, "rdp": 1.1, "gdp": 0.97, "pld": 1.001, "prv": 1.0003, "prv:lower": 1.0}
KINDS = {"gdp": "estimate", "prv:lower": "lower_bound", "shuffled": "lower_bound", "strong:published": "heuristic"}


def answer(run, trial, value, seconds=0.01, **detail):
    result = {"epsilon": value, "kind": KINDS.get(trial.accountant, "upper_bound"), "detail": detail}
    return run.add(trial, result | {"compute_seconds": seconds})


def swept(run):
    along = {"noise_multiplier": [2.0, 4.0, 8.0], "sample_rate": [0.005, 0.01, 0.02], "delta": [1e-7, 1e-5]}
    points = [POINT | {field: value} for field, values in along.items() for value in values]
    for (name, factor), point in itertools.product(FACTORS.items(), points):
        value = factor * 100 * point["sample_rate"] / point["noise_multiplier"] * 3.6
        answer(run, SweepTrial(accountant=name, **point), value)
    return run


def schemed(run):
    schemes = ("poisson", "without_replacement", "shuffled")
    for index, (scheme, least) in enumerate(itertools.product(schemes, (True, False))):
        adjacency = "replace_one" if not least else "zero_out" if scheme == "shuffled" else "add_remove"
        for place, sigma in enumerate([1.0, 2.0, 4.0], 3 * index):
            fields = POINT | {"noise_multiplier": sigma, "sampling": scheme, "adjacency": adjacency, "scheme": scheme}
            answer(run, SchemeTrial(accountant="prv", **fields), (3.0 + place) / sigma)
            if sigma == 1.0:
                answer(run, SchemeTrial(accountant="moments", **fields), (5.0 + place) / sigma)
            if scheme == "shuffled":
                answer(run, SchemeTrial(accountant="shuffled", **fields), (1.0 + place) / sigma / 4)
    return run


def priced(run):
    for name, factor in {"moments": 1.0, "rdp": 1.43, "gdp": 1.7, "prv": 1.68, "simple": 0.01}.items():
        for unknown, target in itertools.product(["steps", "noise_multiplier"], [0.5, 1.26, 5.0]):
            given = {"noise_multiplier": 4.0} if unknown == "steps" else {"steps": 10_000}
            trial = CalibrationTrial(
                accountant=name, unknown=unknown, target_epsilon=target, sample_rate=0.01, delta=1e-5, **given
            )
            more = factor ** (1.26 / target) ** 0.5  # of more noise there is more to gain
            value = round(10_021 * more) if unknown == "steps" else 4.0 / more**0.5
            result = {"value": value, "epsilon": target * 0.9999, "kind": KINDS.get(name, "upper_bound"), "detail": {}}
            run.add(trial, result | {"steps": 1, "evaluations": 5})
    return run


def mapped(run):
    for name, factor in FACTORS.items():
        for q, sigma, steps in itertools.product([0.001, 0.1, 1.0], [0.5, 2.0], [100, 10_000]):
            trial = MapTrial(accountant=name, sample_rate=q, noise_multiplier=sigma, steps=steps, delta=1e-5)
            if name == "pld" and steps == 10_000:
                run.add(trial, outcome="unsupported", evidence="its grid would need 2,859,569 losses")
            else:
                answer(run, trial, factor * 100 * q / sigma, seconds=1e-4 * steps)
    return run


def epochs(run):
    for name, factor in {**FACTORS, "simple": 200.0, "strong:published": 9.9}.items():
        for steps in (100, 1000, 10_000):
            answer(run, EpsilonTrial(accountant=name, **POINT | {"steps": steps}), factor * 0.95 * (steps / 1e4) ** 0.5)
    return run


def tuned(run):
    for sigma, (distribution, runs) in itertools.product(
        [1.0, 2.0], [("", 1), *itertools.product(["poisson", "geometric"], [2, 10, 100])]
    ):
        fields = POINT | {"noise_multiplier": sigma, "runs": runs, "distribution": distribution}
        answer(run, TunedTrial(accountant="rdp", **fields), (2.0 + runs**0.4) / sigma)
    return run


MAKERS = {
    "epsilon_epochs": epochs,
    "epsilon_sweeps": swept,
    "sampling_schemes": schemed,
    "accountant_price": priced,
    "accounting_map": mapped,
    "tuning": tuned,
}


@pytest.mark.parametrize("figure", list(MAKERS))
def test_no_text_is_cut_off_or_lies_on_another(run, figure):
    _, drawn, boxes = draw(MAKERS[figure](run), figure)
    assert_apart(drawn, boxes)


@pytest.mark.parametrize("figure", ["epsilon_epochs", "epsilon_sweeps"])
def test_kinds_are_told_apart_without_colour(run, figure):
    _, drawn, boxes = draw(MAKERS[figure](run), figure)
    axes = drawn.axes[0]
    dashes = {line.get_label(): line.get_linestyle() for line in axes.lines}
    assert (dashes["moments"], dashes["PRV"], dashes["GDP"]) == ("-", "-", ":")
    assert any(isinstance(shade, PolyCollection) and shade.get_hatch() for shade in axes.collections)
    assert {"GDP (estimate)", "below the certified lower bound", "moments"} <= {text for text, _ in boxes}
    if figure == "epsilon_epochs":
        assert dashes["strong, as published in 2016"] == "--"
    markers = [line.get_marker() for line in axes.lines if line.get_label() in ("moments", "RDP", "GDP", "PRV", "PLD")]
    assert len(set(markers)) == 5


def test_ratios_are_to_the_lower_bound_at_the_same_setting(run):
    frame, *_ = draw(swept(run), "epsilon_sweeps")
    assert list(frame.ratio) == pytest.approx(list(frame.accountant.map(FACTORS)))


def test_what_is_far_off_is_in_the_table_alone(run):
    frame, drawn, _ = draw(priced(run), "accountant_price")
    bought = frame[(frame.target_epsilon == 1.26) & (frame.accountant == "prv")]
    assert list(bought.ratio) == [pytest.approx(0.77, abs=0.01), pytest.approx(1.68, abs=0.01)]
    assert "simple composition" not in {line.get_label() for line in drawn.axes[0].lines}  # a hundredth: in the table


def test_schemes_have_their_bars_bounds_and_certain_part(run):
    frame, drawn, boxes = draw(schemed(run), "sampling_schemes")
    texts = [text for text, _ in boxes]
    assert texts.count("without_replacement") >= 2
    assert {"add or remove one", "make one zero", "replace one"} <= set(texts)
    assert "shuffled, at least" in texts
    bars = [patch for patch in drawn.axes[0].patches if patch.get_width()]
    assert sum(patch.get_hatch() is None for patch in bars) == 6  # three schemes, two adjacencies
    assert sum(patch.get_hatch() is not None for patch in bars) == 2  # both of the shuffled
    assert list(dict.fromkeys(frame.scheme)) == ["poisson", "without_replacement", "shuffled"]


def test_the_map_counts_what_has_no_answer_and_shows_what_is_no_bound(run):
    frame, drawn, boxes = draw(mapped(run), "accounting_map")
    texts = [text for text, _ in boxes]
    assert texts.count("✕1") == 12  # PLD's six cells in both bands
    assert texts.count("0.97") == 6  # the estimate, below the lower bound
    assert texts.count("1.3") == 6 and texts.count("1.0 s") == 24
    assert len(drawn.axes) == 10
    assert frame.note.notna().sum() == 6


def test_tuned_runs_stand_beside_one_run(run):
    frame, drawn, _ = draw(tuned(run), "tuning")
    ten = frame[(frame.runs == 10) & (frame.noise_multiplier == 1.0)]
    assert list(ten.ratio) == [pytest.approx((2 + 10**0.4) / 3)] * 2
    assert len(drawn.axes) == 2 and "becomes" in FIGURES["tuning"].finding(frame)


def test_what_a_trade_off_curve_says_at_most_is_rounded_up():
    figure = trade_off_plot.draw(TradeOff(mu=0.5), 2.10132, 1e-5)
    (said,) = [text.get_text().replace("\n", " ") for text in figure.texts if "at most" in text.get_text()]
    assert "Advantage: 0.198 at most" in said and "= (2.102, 1e-5)" in said  # 2Φ(1/4) - 1 = 0.19741


def test_of_solid_curves_that_coincide_the_first_is_drawn_wider(run):
    for name, steps in itertools.product(("prv", "pld", "gdp", "moments"), (100, 1000, 10_000)):
        trial = EpsilonTrial(accountant=name, **POINT | {"steps": steps})
        answer(run, trial, steps**0.5 * (2 if name == "moments" else 1))
    _, drawn, _ = draw(run, "epsilon_epochs")
    width = {line.get_label(): line.get_linewidth() for line in drawn.axes[0].get_lines()}
    assert width["PRV"] > width["PLD"] == width["moments"] == width["GDP"]
