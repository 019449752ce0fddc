"""Check that lines of a file are whole records: the shapes of lines, and of each kind of trial's result.

A shape has what reports, plans and comparisons rely on; a record may hold more. For kinds of your own experiments,
results have no shape, and only the trial fields that are read for any kind are checked.

Functions take:
    line, record, trial: read from a file of records; to be written; a record's description of its trial.
"""

import functools
from collections.abc import Mapping
from typing import Any

from dpbench.trials.outcome import Outcome
from dpbench.trials.shapes import (
    ABOVE_0,
    ANY,
    BASE64,
    COUNT,
    FILE_NAME,
    FINITE,
    FLAG,
    NOISE,
    NUMBER,
    POSITIVE,
    SECONDS,
    TEXT,
    UTC,
    WHOLE,
    Shape,
    by_tag,
    check,
    every,
    flaw,
    one_of,
    optional,
    some,
    too_deep,
)

OUTCOME = one_of(*map(str, Outcome))
_TEXT = optional(TEXT)
_NUMBER = optional(NUMBER)
_WHOLE = optional(WHOLE)

_VERSIONS = every(_TEXT)
_WITH_HOST = check({"host": TEXT})
_WITH_KIND = check({"kind": TEXT})
ENVIRONMENT: Shape = {
    "host?": TEXT,
    "device": TEXT,
    "device_name": TEXT,
    "torch?": _TEXT,
    "cpu_model?": _TEXT,
    **dict.fromkeys(("threads?", "cpu_count?", "cpus_available?", "memory_total?", "device_memory?"), _WHOLE),
    "load_average?": optional(SECONDS),
    "packages?": _VERSIONS,
    "variables?": every(TEXT),
    "libraries?": optional(_VERSIONS),
    "executor?": optional({"name": TEXT, "cluster": TEXT, "driver": TEXT, "versions": _VERSIONS}),
    "results_folder?": _TEXT,
    "gpu_state?": optional(_VERSIONS),
    "gpu_processes?": optional([TEXT]),
}
_RUN: Shape = {"id": TEXT, "round": COUNT, "fingerprint": TEXT, "trial": {"kind": TEXT}, "seconds": SECONDS, "utc": UTC}
_TRIAL: Shape = _RUN | {"experiment": TEXT, "outcome": OUTCOME, "result": optional(every(ANY))}
_TRIAL |= {"version?": _TEXT, "evidence?": _TEXT, "load?": optional(SECONDS), "stolen?": optional(SECONDS)}
_ENVIRONMENT = check({"environment": ENVIRONMENT})
LINES: Mapping[str, Any] = {"environment": _ENVIRONMENT, "trial": check(_TRIAL), "cut": check(_RUN)}

#: A trial's answer.
ANSWER = check({"outcome": OUTCOME, "evidence": _TEXT, "result": optional(every(ANY))})

#: Field of a trial, in any kind -> shape.
_FIELDS: Mapping[str, Shape] = {
    **dict.fromkeys(("model", "backend", "device", "precision", "data", "accountant", "sampling", "adjacency"), TEXT),
    **dict.fromkeys(("scheme", "unknown", "network", "clip", "fault", "form", "task", "family", "spread"), TEXT),
    **dict.fromkeys(("dtype", "optimizer", "distribution", "way"), TEXT),
    **dict.fromkeys(("seed", "canaries", "public_epochs"), WHOLE),
    **dict.fromkeys(("batch_size", "epochs", "processes", "rounds", "runs", "records", "public_records"), POSITIVE),
    **dict.fromkeys(("steps", "threads", "memory_budget", "dataset_size", "max_batch_size"), _WHOLE),
    **dict.fromkeys(("image_size", "num_classes"), optional(POSITIVE)),
    **dict.fromkeys(("sample_rate", "delta", "max_grad_norm", "lr", "max_seconds", "timeout"), FINITE),
    "noise": NOISE,
    "noise_multiplier": optional(FINITE),
    "target_epsilon": optional(ABOVE_0),
    **dict.fromkeys(("simulated", "measure", "small", "compiled"), FLAG),
    "backends": [TEXT],
}
_EVERYWHERE = ("model", "backend", "backends", "batch_size", "accountant", "device", "precision", "threads")
_OF_ANY_KIND = check({f"{name}?": _FIELDS[name] for name in _EVERYWHERE})
_STEP = "model backend batch_size device precision image_size num_classes"
_TURNS = "model backends batch_size device precision image_size num_classes"
_EPSILON = "accountant sample_rate delta"
#: kind -> fields of its trials.
_TRIALS = {
    "step": _STEP,
    "peak": f"{_STEP} simulated memory_budget",
    "largest": f"{_STEP} memory_budget",
    "confirm": f"{_STEP} memory_budget",
    "overhead": f"{_TURNS} rounds",
    "training_step": f"{_TURNS} rounds optimizer",
    "distributed": f"{_TURNS} processes spread",
    **dict.fromkeys(("epsilon", "epsilon_sweep", "epsilon_map"), f"{_EPSILON} noise_multiplier steps"),
    "epsilon_scheme": f"{_EPSILON} noise_multiplier steps scheme",
    "epsilon_tuned": f"{_EPSILON} noise_multiplier steps runs distribution",
    "calibration": f"{_EPSILON} unknown target_epsilon",
    "check": "model backend",
    "explain": "model batch_size",
    "coverage": "model backends task",
    "conformance": "backend",
    "sensitivity": "backend dtype",
    "utility": "network data backend clip batch_size epochs lr max_grad_norm target_epsilon delta seed",
    "adam_bias": "network data optimizer batch_size epochs lr max_grad_norm target_epsilon delta seed",
    "correlated": "network data noise batch_size epochs lr max_grad_norm target_epsilon delta seed",
    "audit": "backend fault form sample_rate target_epsilon max_grad_norm steps canaries seed",
    "memorisation": "target_epsilon seed records public_records epochs public_epochs",
    "device": "device",
    "norms": "family precision small",
    "parts": "model backend batch_size precision optimizer",
    "profile": "model backends batch_size precision",
    "launches": "model backends batch_size",
}

_FILES: Shape = {"files?": every(FILE_NAME)}
#: A result whose files are not written yet, with their content.
_CONTENTS = check({"files?": every(BASE64)})
_MEMORY: Shape = {
    "source": TEXT,
    "peak_bytes": POSITIVE,
    **dict.fromkeys(("baseline_bytes?", "allocated_bytes?", "reserved_bytes?", "pool_bytes?"), _WHOLE),
    "phases?": every(WHOLE),
}
_VERIFICATION: Shape = {"max_norm_error": NUMBER, "max_grad_error": NUMBER, "tolerance": NUMBER}
_COVERAGE = every(FINITE)
_TURN: Shape = {"round": COUNT, "position?": COUNT, "step_seconds": some(ABOVE_0), "joules_per_step?": optional(FINITE)}
_ENTRY: Shape = {
    "evidence?": _TEXT,
    "memory?": _MEMORY,
    "verification?": _VERIFICATION,
    "coverage?": _COVERAGE,
    "way?": TEXT,
    "turns?": [_TURN],
    **{name: [SECONDS] for name in ("step_seconds?", "warmup_seconds?")},
    "model_flops?": WHOLE,
    # of an engine in another framework (`dpbench.measure.jax_peer.entry`)
    "plain?": {"turns": [_TURN], "memory": _MEMORY},
    "compile_seconds?": {"private": SECONDS},
    "microbatch?": optional(COUNT),
    "versions?": every(TEXT),
}


def _of_each_backend(ok: Shape) -> Any:
    """Backend -> its entry, of another shape if its outcome is not "ok"."""
    return every(by_tag("outcome", {str(each): _ENTRY for each in Outcome} | {str(Outcome.OK): ok}))


_MEASURED: Shape = _ENTRY | {"turns": some(_TURN), "memory": _MEMORY}
_PROFILED: Shape = {
    **dict.fromkeys(("launches", "waits"), optional(FINITE)),
    **dict.fromkeys(("operations", "device_seconds"), FINITE),
    "top": [{"name": TEXT, "asked_by": _TEXT, "calls": FINITE, "seconds": SECONDS, "share": FINITE}],
}
_LAUNCHED = ("launches", "bytes_read", "bytes_written", "flops")
_PAIRED: Shape = {"backends": _of_each_backend(_MEASURED), "parameters?": WHOLE}
_PART: Shape = {"seconds": some(SECONDS), "launches": optional(FINITE), "waits": optional(FINITE)}
_CLAIM: Shape = {"epsilon": NUMBER, "kind": TEXT, "detail?": every(ANY)}
_ERRORS: Shape = {"norm_error": _NUMBER, "grad_error": _NUMBER, "reason": _TEXT, "coverage": optional(_COVERAGE)}
_ROW: Shape = _ERRORS | {"backend": TEXT, "status": one_of("exact", "refused", "wrong", "crash", "unavailable")}
_ROWS: Shape = {"rows": [_ROW], "tolerance?": FINITE}
_COUNTS: Shape = {"ghost": _WHOLE, "instantiate": _WHOLE}
_USE: Shape = {
    "parameter": TEXT,
    "op": TEXT,
    **dict.fromkeys(("T", "d", "p", "two_T_squared", "p_times_d"), _WHOLE),
    **dict.fromkeys(("plan", "paper_choice"), _TEXT),
    **dict.fromkeys(("bytes", "flops"), _COUNTS),
}
_MOVE: Shape = {"case": TEXT, "outcome": TEXT, **dict.fromkeys(("excess", "limit"), optional(FINITE))}
_MOVE |= {"batch_size?": _WHOLE, "counts?": optional(every(COUNT)), "record?": _TEXT, "reason?": _TEXT}
_NORM: Shape = dict.fromkeys(("operation", "sizes", "parameter", "route", "way"), TEXT)
_NORM |= {"error": _NUMBER, "limit": _NUMBER, "outcome": OUTCOME, "evidence": _TEXT}
_BOUNDS = (
    *("claimed_mu", "claimed_step_epsilon", "mu_lower_bound", "step_epsilon_lower_bound"),
    *("delta", "level", "noise_multiplier", "sensitivity", "sigma_hat"),
)
_GUESSES = ("correct", "guesses", "positives", "negatives", "false_positives", "false_negatives")
_EPSILON_FOUND: Shape = _CLAIM | {"compute_seconds": SECONDS, "all_seconds?": [SECONDS]}
_TRAININGS = ("utility", "correlated", "adam_bias")
#: kind -> result of a trial that succeeded.
_RESULTS: Mapping[str, Shape] = {
    "step": {
        "step_seconds": some(ABOVE_0),
        "memory": _MEMORY,
        "verification?": _VERIFICATION,
        "coverage?": _COVERAGE,
        **dict.fromkeys(("parameters?", "model_flops?"), WHOLE),
    },
    "peak": {"memory": _MEMORY, "budget_bytes?": _WHOLE, "parameters?": WHOLE},
    "largest": {
        "batch_size?": WHOLE,
        "ended?": TEXT,
        "probes?": [{"batch_size": POSITIVE, "fits": FLAG, "peak_bytes": POSITIVE}],
    },
    "confirm": {
        "probes": [{"batch_size": POSITIVE, "fits": FLAG, "memory?": optional(_MEMORY)}],
        "verification": _VERIFICATION,
    },
    "overhead": _PAIRED,
    "training_step": _PAIRED | {"energy?": TEXT},
    "distributed": {
        "backends": every({"memory": some(_MEMORY), "turns": some(_TURN)}),
        "communication": TEXT,
        "oversubscribed": FLAG,
        "parameters?": WHOLE,
        "verification?": _VERIFICATION,
    },
    **dict.fromkeys(("epsilon", *(f"epsilon_{kind}" for kind in ("sweep", "scheme", "map", "tuned"))), _EPSILON_FOUND),
    "calibration": _CLAIM | {"value": NUMBER, "steps?": WHOLE},
    "explain": {"rows": [_USE], "summary": {"batch_size": WHOLE, "inputs": some(some(WHOLE))}},
    "coverage": _ROWS | {"built": FLAG},
    "conformance": {"rows": [_ERRORS | {"case": TEXT, "result": one_of("exact", "refuses", "wrong"), "raised": FLAG}]},
    "sensitivity": {"rows": [_MOVE]},
    "device": {
        "facts": every(ANY),
        "versions": every(ANY),
        "bandwidth": [{"what": TEXT, "bytes_per_second": FINITE}],
        "products": [{"size": POSITIVE, "precision": TEXT, "flops_per_second": FINITE}],
        "latency": [{"what": TEXT, "seconds": SECONDS}],
    },
    "norms": {"rows": [_NORM]},
    "parts": {
        "tensors": COUNT,
        "counted": TEXT,
        "steps": {
            name: {"parts": dict.fromkeys(parts.split(), _PART), "step_seconds": some(ABOVE_0)}
            for name, parts in (
                ("plain", "forward backward optimizer rest"),
                ("private", "forward clip finite noise optimizer rest"),
            )
        },
    },
    "profile": {"counted": TEXT, "backends": _of_each_backend(_PROFILED)},
    "launches": {"backends": _of_each_backend(dict.fromkeys(_LAUNCHED, COUNT))},
    **{
        kind: {
            "accuracy": FINITE,
            "curve": some({"accuracy": FINITE, "seconds": SECONDS, "steps": COUNT}),
            "test_losses": some(NUMBER),
            "noise?": TEXT,
            "steps?": COUNT,
            **dict.fromkeys(("epsilon?", "delta?", "noise_multiplier?", "spread?"), optional(FINITE)),
            "kind_of_epsilon?": _TEXT,
        }
        for kind in _TRAININGS
    },
    "audit": {
        **dict.fromkeys(("claimed_epsilon", "epsilon_lower_bound"), FINITE),
        **dict.fromkeys((f"{name}?" for name in _BOUNDS), FINITE),
        **dict.fromkeys((f"{name}?" for name in _GUESSES), COUNT),
        "p_values?": every(FINITE),
        "refuted_by?": [TEXT],
        "releases?": COUNT,
        "violated?": FLAG,
    },
    "memorisation": {
        "exposures": some({"times": POSITIVE, "bits": SECONDS}),
        "bits_of_all": ABOVE_0,
        **dict.fromkeys(("bits_per_byte", "bits_per_byte_before"), ABOVE_0),
        **dict.fromkeys(("epsilon", "delta"), optional(FINITE)),
        "seconds": SECONDS,
    },
}
_OF_ANY_RESULT = check(_FILES)
_CHECKS = {kind: check(shape | _FILES) for kind, shape in _RESULTS.items()}
#: kind -> field that a result without rows has instead -> the result.
_INSTEAD_OF_ROWS = {
    "coverage": {"reason": check({"built": FLAG, "reason": TEXT})},
    "explain": {"usage": check({"usage": TEXT}), "problems": check({"problems": [{"module": TEXT, "reason": TEXT}]})},
}


def flaw_of_result(kind: str, result: Any) -> str | None:
    """What a successful trial's result lacks, by its kind, before its files are written; None if it is whole.

    Args:
        kind: of the trial.
        result: from its body.
    """
    if too_deep(result):
        return "result: nested too deeply"
    return flaw(result, _CONTENTS, "result") or _flaw_of_whole(kind, _with_names(result))


def flaw_of_record(record: Mapping[str, Any]) -> str | None:
    """Why readers would reject a trial's record, before its files are written; None if it is whole."""
    result = record["result"]
    if result is not None and (found := flaw(result, _CONTENTS, "result")) is not None:
        return found
    line = {**record, "result": _with_names(result), "type": "trial"}
    return "nested too deeply" if too_deep(line) else flaw_of_line(line, {})


def _with_names(result: Any) -> Any:
    """The result with a name in place of each file's content."""
    return result | {"files": dict.fromkeys(result["files"], "a name")} if result and "files" in result else result


def _flaw_of_whole(kind: str, result: Any) -> str | None:
    """What the result of a trial that succeeded lacks."""
    found = set(result) if isinstance(result, dict) else set()
    others = () if "rows" in found else found & _INSTEAD_OF_ROWS.get(kind, {}).keys()
    checks = [_INSTEAD_OF_ROWS[kind][name] for name in others] or [_CHECKS.get(kind, _OF_ANY_RESULT)]
    if (why := flaw(result, checks[0], "result")) is not None or kind not in _TRAININGS:
        return why
    points, losses = len(result["curve"]), len(result["test_losses"])
    return None if points == losses else f"result.test_losses: expected {points}, as in result.curve, got {losses}"


def result_of(line: Mapping[str, Any]) -> Mapping[str, Any]:
    """The result of a trial's line; of one that failed only if it is whole, so that all of its fields are there."""
    result = line.get("result") or {}
    whole = line["outcome"] == Outcome.OK or _flaw_of_whole(line["trial"]["kind"], result) is None
    return result if whole else {}


def flaw_of_line(line: Mapping[str, Any], sound: Mapping[str, Any]) -> str | None:
    """Why a line is not a whole record of today's schema, in words; None if it is.

    Args:
        sound: identity -> a trial that is known to be whole, and is not checked again.
    """
    kind_of_line = line["type"]
    if (found := flaw(line, LINES[kind_of_line])) is not None:
        return found
    if kind_of_line == "environment":  # a sweep's records are grouped by machine
        where = line["environment"]
        return flaw(where, _WITH_HOST, "environment") if where.get("executor") else None
    trial = line["trial"]
    if sound.get(line["id"]) != trial and (found := _flaw_of_trial(trial)) is not None:
        return found
    return None if kind_of_line == "cut" else _flaw_of_found(trial["kind"], line)


def flaw_of_trial(trial: Any) -> str | None:
    """How the description of a trial differs from its kind's; None if it does not."""
    if too_deep(trial):
        return "trial: nested too deeply"
    return flaw(trial, _WITH_KIND, "trial") or _flaw_of_trial(trial)


def _flaw_of_trial(trial: Mapping[str, Any]) -> str | None:
    kind = trial["kind"]
    return _too_large(trial) or flaw(trial, _fields_of(kind) if kind in _TRIALS else _OF_ANY_KIND, "trial")


@functools.cache
def _fields_of(kind: str) -> Any:
    shape: dict[str, Shape] = {f"{name}?": each for name, each in _FIELDS.items()}
    shape |= {name: _FIELDS[name] for name in _TRIALS[kind].split()}
    if kind.startswith("epsilon"):  # only a calibration leaves these open
        shape |= {"noise_multiplier": FINITE, "steps": WHOLE}
    if kind == "calibration":
        shape["target_epsilon"] = ABOVE_0
    return check(shape)


def _too_large(value: Any, where: str = "trial") -> str | None:
    """The first number too large to compute with."""
    for key, each in value.items() if isinstance(value, dict) else enumerate(value):
        if isinstance(each, (dict, list)):
            if (found := _too_large(each, f"{where}.{key}")) is not None:
                return found
        elif type(each) in (int, float) and (found := flaw(each, NUMBER, f"{where}.{key}")) is not None:
            return found
    return None


def _flaw_of_found(kind: str, line: Mapping[str, Any]) -> str | None:
    """The same of a result; that of a failed trial may be partial."""
    result = line["result"]
    if line["outcome"] == Outcome.OK:
        found = _flaw_of_whole(kind, result)
        asked = line["trial"]["backends"] if found is None and kind in ("overhead", "training_step") else ()
        missing = [name for name in asked if name not in result["backends"]]
        return f"result.backends: expected {missing[0]}, got none" if missing else found
    return None if result is None or kind not in _RESULTS else flaw(result, _partial_result(kind), "result")


@functools.cache
def _partial_result(kind: str) -> Any:
    return check({f"{name.removesuffix('?')}?": optional(each) for name, each in _RESULTS[kind].items()} | _FILES)
