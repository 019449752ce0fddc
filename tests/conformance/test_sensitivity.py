"""How far hard records move the sum: backends with known faults are measured, and ours are searched for more."""

import json
import math
from itertools import product

import pytest
import torch
from hooked import changed
from hypothesis import Phase, example, given, settings, target
from hypothesis import strategies as st
from marks import slow_unless
from report_records import RunFile

from clipping import BACKENDS, ClippedGradient, Flat, Problem, UnsupportedModel, load_backend
from clipping.backends.microbatch import Microbatch
from dpbench.cli import check, main
from dpbench.conformance import ConformanceTrial
from dpbench.conformance.sensitivity import DTYPES, LIMITS, SensitivityTrial
from dpbench.conformance.sensitivity.records import RECORDS
from dpbench.conformance.sensitivity.scorecard import FIELDS, in_units
from dpbench.conformance.sensitivity.search import FOUND, KINDS, Point
from dpbench.measure.sensitivity import measured, sensitivity
from dpbench.process.parent import Answer
from dpbench.records.reader import read
from dpbench.report import LeftOut
from dpbench.report.figures import scorecard
from dpbench.report.figures import sensitivity as figure
from dpbench.trials.outcome import Outcome

CASES = {case.name: case for case in RECORDS}
CLIPPING = [name for name in BACKENDS if name != "nonprivate"]


def refusing(error):
    class Refusing(Microbatch):
        name = "refusing"

        def _clipped(self, parameters, inputs, targets, batch_size):
            if not bool(torch.isfinite(inputs).all()):
                raise error
            return super()._clipped(parameters, inputs, targets, batch_size)

    return Refusing


# What is measured


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_ordinary_record_moves_the_sum_by_c(dtype):
    found = measured(CASES["ordinary"], Microbatch, dtype)
    assert found.outcome == "within" and found.counts == {"within": 1}
    assert found.excess == pytest.approx(1, abs=1e-2 if "16" in dtype else 1e-6)
    assert found.excess <= found.limit <= LIMITS[dtype]


def test_sums_that_are_compared_go_by_the_same_plan():
    """One that is timed changes in its second step."""

    class Replanned(Microbatch):
        planner, steps = "changes once", 0

        def _clipped(self, parameters, inputs, targets, batch_size):
            out = super()._clipped(parameters, inputs, targets, batch_size)
            self.steps += 1
            grads = {name: grad * (1 + 0.5 * (self.steps == 1)) for name, grad in out.grads.items()}
            return ClippedGradient(grads, out.norms, out.losses)

    found = measured(CASES["ordinary"], Replanned, "float32")
    assert found.outcome == "within" and found.excess == pytest.approx(1, abs=1e-6)


def test_the_excess_is_in_units_of_c_and_above_the_limit_it_is_too_far():
    twice = measured(CASES["ordinary"], changed(lambda grad, _: 2 * grad), "float32")
    assert twice.outcome == "exceeds" and twice.excess == pytest.approx(2)
    case = CASES["ordinary"]
    problem = case.make(torch.finfo(torch.float32))
    wider = type(case)("wider", "", lambda _: type(problem)(problem.model, problem.batches, Flat(max_grad_norm=0.25)))
    assert measured(wider, Microbatch, "float32").excess == pytest.approx(1)


def test_a_backend_is_held_to_what_it_states_where_that_is_less():
    class States(changed(lambda grad, _: 1.005 * grad)):
        bound = 1.001

        def sensitivity_bound(self, batch_size):
            return {9: self.bound}[batch_size]

    class StatesNothing(States):
        bound = math.inf

    found = measured(CASES["ordinary"], States, "float32")
    assert (found.outcome, found.limit) == ("exceeds", 1.001)
    assert measured(CASES["ordinary"], StatesNothing, "float32").outcome == "within"


def test_a_sum_that_is_no_number_is_told_apart_from_a_refusal():
    class Silent(Microbatch):
        refuses_no_numbers = False

    for name in ("a pixel is NaN", "a pixel is infinite"):
        assert measured(CASES[name], Silent, "float32").outcome == "not a number"
        named = measured(CASES[name], refusing(ValueError("record 0 of 9 has a gradient that is no number")), "float32")
        assert named.outcome == "refused" and "record 0" in named.reason
        known = UnsupportedModel("refusing", [Problem("model", "not finite", "leave it out")])
        assert measured(CASES[name], refusing(known), "float32").outcome == "refused"
        other = measured(CASES[name], refusing(RuntimeError("no such thing")), "float32")
        assert (other.outcome, other.reason) == ("error", "RuntimeError: no such thing")


def test_what_the_ordinary_batch_meets_is_no_finding_about_the_record():
    class Refuses(Microbatch):
        name = "refuses"

        def problems(self):
            yield Problem("model", "never", "no remedy")

    assert measured(CASES["ordinary"], Refuses, "float32").outcome == "unsupported"
    broken = measured(CASES["ordinary"], changed(lambda grad, _: grad * math.nan), "float32")
    assert (broken.outcome, broken.reason) == ("unsupported", "the sum of the ordinary batch is no number")
    found = measured(CASES["ordinary"], load_backend("tf_microbatch:2"), "float32")
    assert found.outcome == "unsupported" and "another mechanism" in found.reason


@pytest.mark.slow
def test_the_worst_of_several_records_counts():
    """The last one makes the sum infinite, another trebles it, the rest move it little."""

    def change(grad, inputs):
        return grad * {1044: math.inf, 1030: 3}.get(len(inputs), 1)

    found = measured(CASES["alike in thousands"], changed(change), "bfloat16")
    assert found.outcome == "exceeds" and found.excess > 100 and found.batch_size in (1030, 1031)
    assert found.counts["not a number"] == 1 and found.counts["exceeds"] >= 2
    assert found.record in ("one more than 1029", "one more than 1030")


def test_cases_are_the_same_every_time_and_fit_their_batch():
    for case in RECORDS:
        for dtype in case.dtypes:
            numbers = torch.finfo(torch.float32 if "-" in dtype else getattr(torch, dtype))
            first, second = (
                [(record, batch) for batch in case.make(numbers).batches for record in batch.records] for _ in range(2)
            )
            assert first and len({record.label for record, _ in first}) == len(first)
            for (one, batch), (again, _) in zip(first, second, strict=True):
                assert torch.equal(one.inputs.nan_to_num(), again.inputs.nan_to_num())
                assert torch.equal(one.weights, again.weights)
                assert one.inputs.shape == (1, *batch.inputs.shape[1:]) and one.weights.shape == (
                    1,
                    *batch.weights.shape[1:],
                )
                assert len(batch.inputs) == len(batch.weights) >= one.place


# What it shows

KNOWN = [
    ("opacus_ghost", "float32", "cancels over 4 tokens", 1e4),
    ("opacus_ghost", "float32", "cancels over 32 tokens", 1e5),
    ("opacus_ghost", "float32", "cancels in a bias", 1e6),
    ("opacus_ghost", "float32", "constant before group norm", 1e6),
    ("opacus_hooks", "bfloat16", "alike in thousands", 4),
]


@pytest.mark.parametrize(("backend", "dtype", "case", "least"), KNOWN)
def test_what_is_known_of_other_libraries_is_found(backend, dtype, case, least):
    found = measured(CASES[case], load_backend(backend), dtype)
    assert found.outcome == "exceeds" and found.excess > least


FAST = ("float32", "bfloat16")
#: Of the default tests: one pass and two, gradients and Gram matrices.
QUICK = "bk_mixed", "ghost"
#: A record at a time, thousands of records take minutes; in 16 bits, a quarter as many lose a digit.
EVERY = [
    *product((*QUICK, "vmap", "fastgradclip", "mixed_ghost", "bk_ghost"), DTYPES),
    *product(["microbatch"], ("bfloat16", "float16")),
]


@pytest.mark.parametrize(("backend", "dtype"), slow_unless(lambda name, dtype: name in QUICK and dtype in FAST, EVERY))
def test_no_hard_record_moves_the_sum_of_ours_by_more_than_c(backend, dtype):
    found = list(sensitivity(load_backend(backend), dtype))
    assert {one.case: (one.outcome, one.excess) for one in found if one.outcome not in ("within", "refused")} == {}


POINTS = st.builds(
    Point,
    kind=st.sampled_from(KINDS),
    side=st.sampled_from([2, 4]),
    size=st.floats(-6, 18).map(lambda value: round(value, 1)),
    weight=st.floats(-6, 6).map(lambda value: round(value, 1)),
    spread=st.floats(-8, 0).map(lambda value: round(value, 1)),
    cancels=st.booleans(),
    seed=st.integers(0, 999),
    place=st.integers(0, 8),
)


@pytest.mark.parametrize(
    ("backend", "dtype"),
    slow_unless(
        lambda name, dtype: name in ("bk_mixed", "fastgradclip", "vmap") and dtype == FAST[CLIPPING.index(name) % 2],
        product(CLIPPING[:7], FAST),
    ),
)
def test_a_search_finds_no_record_that_moves_the_sum_by_more_than_c(backend, dtype):
    @settings(max_examples=20, phases=(Phase.explicit, Phase.generate, Phase.target), derandomize=True, database=None)
    @given(POINTS)
    def search(point):
        found = measured(point.case, load_backend(backend), dtype)
        if found.excess:
            target(math.log10(found.excess))
        assert found.outcome in ("within", "refused"), (found.excess, found.reason)

    for point in FOUND:
        search = example(point)(search)
    search()


# The command


def run(*arguments, capsys):
    code = main(["check", "--sensitivity", *arguments, "--format", "json"])
    return code, json.loads(capsys.readouterr().out)


def answered(rows):
    return lambda trials: [(trial, Answer(1, Outcome.OK, None, {"rows": rows}, 1.0)) for trial in trials]


def row(case, outcome, excess=None, **fields):
    empty = {"limit": 1.01, "batch_size": 9, "record": "large", "counts": {outcome: 1}, "reason": None}
    return {"case": case, "outcome": outcome, "excess": excess} | empty | fields


@pytest.mark.parametrize(
    ("outcome", "code"),
    [("within", 0), ("refused", 0), ("unsupported", 0), ("exceeds", 1), ("not a number", 1), ("error", 1)],
)
def test_exit_1_if_a_record_moves_the_sum_too_far(outcome, code, capsys, monkeypatch):
    monkeypatch.setattr(check, "answers", answered([row("a", "within", 1.0), row("b", outcome, 2.0)]))
    found, rows = run("--backend", "ghost", capsys=capsys)
    assert found == code and [list(one) for one in rows] == [list(FIELDS)] * 2
    assert [(one["case"], one["backend"], one["dtype"], one["outcome"]) for one in rows] == [
        ("a", "ghost", "float32", "within"),
        ("b", "ghost", "float32", outcome),
    ]


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["opacus_ghost"])
def test_the_command_measures_and_says_who_is_furthest(backend, capsys):
    assert main(["check", "--sensitivity", "--backend", backend, "--dtype", "bfloat16"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split("  ")[0] == "case" and len(lines) == len(CASES) + 3
    (one,) = [line for line in lines if line.startswith("cancels over 4 tokens")]
    assert "exceeds" in one and "inputs 3000" in one
    assert lines[-1].startswith("opacus_ghost, bfloat16: ") and "furthest" in lines[-1]


def test_a_trial_that_does_not_end_well_is_a_row(capsys, monkeypatch):
    ends = {"vmap": Answer(1, Outcome.CRASH, None, None, 1.0)}
    ends["fastdp"] = Answer(2, Outcome.UNSUPPORTED, "fastdp is not available here", None, 1.0)
    monkeypatch.setattr(check, "answers", lambda trials: [(trial, ends[trial.backend]) for trial in trials])
    code, rows = run("--backend", "vmap", "--backend", "fastdp", capsys=capsys)
    assert code == 1
    assert [(one["case"], one["outcome"], one["reason"]) for one in rows] == [
        ("all", "error", "crash: no evidence"),
        ("all", "unsupported", "fastdp is not available here"),
    ]


def test_by_default_all_that_clip_in_float32(capsys, monkeypatch):
    seen = []
    monkeypatch.setattr(check, "answers", lambda trials: answered([])(seen.extend(trials) or trials))
    assert run(capsys=capsys) == (0, [])
    assert [trial.backend for trial in seen] == CLIPPING and {trial.dtype for trial in seen} == {"float32"}
    run("--backend", "vmap", "--dtype", "bfloat16-autocast", capsys=capsys)
    assert seen[-1] == SensitivityTrial(backend="vmap", dtype="bfloat16-autocast")


def test_excess_in_words():
    values = (None, 0.0, 1.0034, 16.2, 48_731.0, 999_999.0, 3.77e7, 4.5e11, 9.6e93)
    words = ["-", "0.000 C", "1.003 C", "16 C", "49,000 C", "1 million C", "38 million C", "450 billion C", "9.6e+93 C"]
    assert [in_units(value) for value in values] == words


# The figure


@pytest.fixture
def records(tmp_path):
    written = RunFile(tmp_path / "records" / "a.jsonl", experiment="sensitivity")
    far = [row("cancels", "exceeds", 52_000.0), row("plain", "within", 1.0), row("nan", "not a number")]
    written.add(SensitivityTrial(backend="opacus_ghost"), {"rows": far})
    written.add(
        SensitivityTrial(backend="opacus_ghost", dtype="bfloat16"),
        {"rows": [row("tied", "unsupported"), row("many", "exceeds", 2.0)]},
    )
    near = [row("cancels", "within", 0.5), row("plain", "within", 1.0), row("nan", "refused", reason="record 0 is NaN")]
    written.add(SensitivityTrial(backend="bk_mixed"), {"rows": near})
    written.add(
        SensitivityTrial(backend="fastdp"), None, outcome="unsupported", evidence="fastdp is not available here"
    )
    return written


def test_the_table_has_a_row_a_case_and_the_words_name_the_furthest(records):
    left_out = LeftOut()
    frame = figure.table(read(records.path.parent), left_out)
    assert list(frame.backend) == ["bk_mixed"] * 3 + ["opacus_ghost"] * 5  # ours before the peers
    said = figure.text(frame)
    assert said["Furthest"].tolist() == ["1.000 C", "52,000 C", "2.000 C"]
    assert said["Case"].tolist() == ["plain", "cancels", "many"]
    columns = ["Too far", "Not a number", "Record refused", "Model refused", "Within"]
    assert said[columns].values.tolist() == [list("00102"), list("11001"), list("10010")]
    assert figure.FIGURE.finding(frame) == (
        "One record, of 5 hard kinds, moves the computed sum by up to: BK mixed 1.000 C (refuses 1 of the kinds); "
        "Opacus ghost 52,000 C (cancels)."
    )


def test_the_scorecard_says_how_far_a_record_moves_the_sum(records):
    verdict = {"case": "conv2d", "result": "exact", "raised": False, "norm_error": None, "grad_error": None}
    verdict |= {"coverage": {}, "reason": None}
    for backend in ("bk_mixed", "opacus_ghost", "vmap"):
        records.add(ConformanceTrial(backend=backend), {"rows": [verdict]})
    kept, left_out = read(records.path.parent), LeftOut()
    frame = scorecard.table(kept, left_out)
    assert list(frame.columns) == ["case", "vmap", "bk_mixed", "opacus_ghost"]
    assert scorecard.moves(frame).values.tolist() == [
        ["one record moves the sum by, float32", "-", "1.000 C", "52,000 C"],
        ["one record moves the sum by, bfloat16", "-", "-", "2.000 C"],
    ]
    assert list(scorecard.cases(frame)["case"]) == ["conv2d"]
    said = " ".join(scorecard.FIGURE.caption(kept, frame))
    assert "1 cases" in said and "the furthest that a hard record moves the sum" in said
    words = [text.get_text() for text in scorecard.plot(frame, said).axes[0].texts]
    assert "52,000" in words
