"""Experiments: measure time, memory, exactness and privacy, and report the results.

## A run

```sh
python -m dpbench plan memory_speed                         # trials done and left, and their time
python -m dpbench run memory_speed --minutes 9              # run or resume; Ctrl-C loses nothing
python -m dpbench report memory_speed                       # figures, tables, and one page of all
python -m dpbench compare before after --fail-on slower:5%  # faster, slower, same, not known
python -m dpbench history overhead                          # times over versions of the code
python -m dpbench scorecard                                 # one page of all backends and claims
```

`compare` takes records of two machines, too: then it compares only ratios to ordinary training.

Every trial runs in its own process and appends its record to `results/NAME/*.jsonl`; a crash or a full memory is a
result, too. A finished trial does not run again. `--only model=cnn,resnet18` runs a part, `--smoke` a miniature of all
trials in seconds, `--rounds 5` more rounds, and `--retry error` the failed trials.

Times are **ratios**: a backend and ordinary training take turns in one process, and the ratio is between two turns of
one round. Absolute times change from hour to hour; ratios are stable. Every timed step is checked for exactness, too.

## All experiments

| experiment | question |
|---|---|
| `stress_test` | How large a batch fits into 16 GiB, and how fast is it? (Figure 3 of arXiv:2205.10683) |
| `memory_speed` | What do time and memory cost relative to ordinary training? (Table 4 of the same) |
| `training_step` | What does the whole step cost with noise and optimizer, in dpbench and in other libraries? |
| `overhead` | What does the clipped gradient alone cost, on 12 models? |
| `ablation` | How much does each optimisation of `bk_mixed` save, and how much its planner? |
| `throughput` | How many samples per second are processed at each batch size? |
| `resolution`, `sequence_length` | How does the cost grow with pixels, and with tokens? |
| `vision_transformers`, `book_keeping`, `decision_map` | Do figures of the papers hold here? |
| `captured` | For which public models does the step run as one program? |
| `launches` | How many launches, bytes and operations does a step need on a GPU? (counted without one) |
| `memory_accuracy` | Does simulated memory agree with measured memory? |
| `coverage` | On which public models is each backend exact? |
| `conformance` | Is each backend exact or wrong on hard cases, or does it refuse them? |
| `sensitivity` | How far do hard records move the sum, in units of C? |
| `utility` | What accuracy does a model reach at each ε? |
| `correlated_noise` | Does noise that cancels over steps (BandMF, BLT) train better than DP-SGD at the same ε? |
| `adam_bias` | Does Adam train better if the noise is subtracted from its second moment (DP-AdamBC)? |
| `memorisation` | How much of a secret does a fine-tuned language model reveal? |
| `audit` | Do attacks refute the ε that a run claims? |
| `distributed` | What do several processes cost? |
| `accountants`, `accounting_sweeps`, `accounting_map` | What is ε by each accountant, and how tight is it? |
| `accountant_price`, `sampling_schemes` | What does a loose accountant cost? What is ε under each sampling scheme? |
| `tuning` | What is ε for the best of several runs? |
| `evidence` | What does privacy cost on a GPU? (`make gpu`; the most informative trials first) |

`python -m dpbench list` prints each with one line. results/README.md has the results.

## In a notebook

`dpbench.load("memory_speed")` returns the records as a tidy `pandas.DataFrame`.
`dpbench.run("memory_speed", smoke=True)` measures first.

## On a cluster

```sh
python -m dpbench run stress_test --executor ray --address HOST:6379   # or slurm: the same records
python -m dpbench plan stress_test --cluster cluster.toml              # its hours, cost, efficiency
```

Each executor needs an extra: `pip install -e '.[ray]'` or `'.[slurm]'` in the repository.

## Memory that glibc hands back

After `export MALLOC_MMAP_MAX_=0 MALLOC_TRIM_THRESHOLD_=99999999999` the C library keeps its memory between steps, which
may make them faster.

## One of your own

An experiment is a Python file that defines `EXPERIMENT` (`dpbench.experiment`). Run it by its path:

```python
from dpbench.experiment import Experiment, grid
from dpbench.trials import StepTrial


def cells(device):
    return grid(StepTrial, model="cnn", backend=["nonprivate", "bk_mixed"], batch_size=32, device=device)


EXPERIMENT = Experiment(name="my_own", doc="What clipping costs on the CNN.", cells=cells, smoke=cells)
```
"""
