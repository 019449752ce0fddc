"""dpbench: which way of clipping per-sample gradients to use, what it costs, whether it is exact, what privacy it buys.

Importing it imports no torch: the command line answers at once, and no device is taken from a trial.
"""

__version__ = "0.1.0"
