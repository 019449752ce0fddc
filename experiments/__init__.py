"""What is measured: one Python file an experiment, declarations only. `dpbench.experiment` finds them on disk."""
