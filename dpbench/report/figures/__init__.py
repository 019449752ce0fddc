"""Every figure: a module with a `FIGURE` (`dpbench.report.parts.FigureKind`), under the module's name.

A new figure is a new file; a module with several has them in `FIGURES`, under their names.
"""

import dataclasses
import pkgutil
from importlib import import_module

from dpbench.report.parts import FigureKind

#: Name -> heading, in the order of a page. A figure that is not among them has its own `doc`, and comes last.
CONTENTS = {
    "max_batch_throughput": "maximum batch size in a memory budget, and throughput (Figure 3 of arXiv:2205.10683)",
    "memory_speed_table": "time and memory beside ordinary training (Table 4 of arXiv:2205.10683)",
    "memory_accuracy": "simulated beside measured peak memory of a step, by model, backend and part of the step",
    "epsilon_epochs": "ε against epochs for the accountants (Figure 2 of Abadi et al. 2016)",
    "epsilon_sweeps": "ε along σ, q and δ by each accountant, and how far each is from the certified lower bound",
    "sampling_schemes": "ε of each sampling scheme and adjacency, at equal records, batch size, noise and epochs",
    "tuning": "ε of the best of several runs, beside that of one",
    "accountant_price": "the steps that each accountant allows, and the noise that it asks for, at a target ε",
    "accounting_map": "time, failures and distance from the lower bound of each accountant over (q, σ, T, δ)",
    "overhead": "time and memory of every backend beside ordinary training, interleaved in one process",
    "training_step": "the whole private training step of every engine beside the plain one, interleaved in one process",
    "resolution": "time, memory and their growth against the size of the images",
    "sequence_length": "time, memory and their growth against the length of the sequences",
    "throughput": "throughput, and time and memory beside ordinary training, against the batch size",
    "beside_papers": "papers' figures again: Figure 4 of arXiv:2205.10683, Figures 4 and 5 of arXiv:2210.00038",
    "decision_map": "ghost norm or instantiated gradient in each layer, by the papers' rule and by ours",
    "claims": "what papers claim, and what these records say to it",
    "scorecard": "is each backend exact, does it refuse, or is it wrong, on every conformance case",
    "coverage": "on which of the models that people load each backend is exact, by library and task",
    "coverage_reasons": "why a backend is not exact on a model that people load, or the model is not built",
    "sensitivity": "how far hard records move the clipped sum, in units of C, by library and dtype",
    "utility": "accuracy against ε by model and clipping function, beside ordinary training",
    "correlated": "test loss at one ε by the steps that noise is correlated over, and in one pass with a BLT",
    "adam_bias": "test loss by learning rate of Adam with and without the noise in its second moment, and of SGD",
    "utility_curves": "accuracy against epochs by ε",
    "time_to_accuracy": "epochs and seconds until a model is nearly as accurate as by ordinary training, by ε and by "
    "backend",
    "memorisation": "what a fine-tuned language model gives away of secrets in its data, by ε",
    "audit": "which tests of an audit refute what an engine claims: the engine as it is, and with seeded faults",
    "distributed": "throughput and memory of private beside ordinary training in several processes, under DDP and "
    "FSDP2",
    "device": "what the device can do at best: bandwidth, rates of matrix products, latencies, versions",
    "norms": "every way to a per-sample norm beside float64, by precision",
    "launches": "launches, bytes and operations of a step on a GPU, counted without one",
    "parts": "a private step taken apart: time, launches and waits of each part, beside the plain step",
    "profile": "where the time of a step goes: its largest operations, by backend",
}


def found() -> dict[str, FigureKind]:
    """Name -> figure, in the order of a page."""
    kinds: dict[str, FigureKind] = {}
    for module in pkgutil.iter_modules(__path__):
        own = import_module(f"{__name__}.{module.name}")
        kinds |= {module.name: own.FIGURE} if hasattr(own, "FIGURE") else own.FIGURES
    order = [*CONTENTS, *sorted(kinds.keys() - CONTENTS.keys())]
    return {name: dataclasses.replace(kinds[name], doc=CONTENTS.get(name, kinds[name].doc)) for name in order}
