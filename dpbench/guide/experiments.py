"""Experiments: what can be measured, and how a run goes.

## A run

```sh
python -m dpbench plan memory_speed                          # what is done, what remains, how long
python -m dpbench run memory_speed --minutes 9               # run, or go on: Ctrl-C loses nothing
python -m dpbench report memory_speed                        # figures, tables, one page of all
python -m dpbench compare before after --fail-on slower:5%   # faster, slower, same, not known
```

Every trial runs in a process of its own, and its record is appended to `results/NAME/*.jsonl`: a crash or a full memory
is a result. Whatever is done is not done again. `--only model=cnn,resnet18` runs a part, `--smoke` all in miniature in
seconds, `--rounds 5` more rounds, `--retry error` once more what failed.

Times are **ratios**: a backend and ordinary training take turns in one process, and the ratio is of two turns of one
round. Absolute times depend on the hour; ratios hold. Every timed step is checked for exactness, too.

## What there is

| experiment | question |
|---|---|
| `stress_test` | How large a batch fits into 16 GiB, and how fast is it? (Figure 3 of arXiv:2205.10683) |
| `memory_speed` | What do time and memory cost beside ordinary training? (Table 4 of the same) |
| `training_step` | What does the whole step cost, ours and the libraries', noise and optimizer included? |
| `overhead` | The same of the clipped gradient alone, on 15 models |
| `ablation` | What is each optimisation of `bk_mixed` worth, and what its planner? |
| `throughput` | Samples per second against the batch size |
| `resolution`, `sequence_length` | How does it grow with pixels, and with tokens? |
| `vision_transformers`, `book_keeping`, `decision_map` | Do figures of the papers hold here? |
| `captured` | Of which public models does the step run as one program? |
| `launches` | How many launches, bytes and operations does a step ask of a GPU? Counted without one |
| `memory_accuracy` | Does simulated memory agree with measured memory? |
| `coverage` | On which public models is each backend exact? |
| `conformance` | Is each backend exact, does it refuse, or is it wrong, on hard cases? |
| `sensitivity` | How far do hard records move the sum, in units of C? |
| `utility` | What accuracy is there at which ε? |
| `correlated_noise` | Does noise that cancels over steps (BandMF, BLT) train better than DP-SGD's at one ε? |
| `adam_bias` | Does Adam train better once the noise is taken off its second moment (DP-AdamBC)? |
| `memorisation` | What does a fine-tuned language model give away of a secret? |
| `audit` | Does a run keep to the ε that it claims? |
| `distributed` | What does it cost in several processes? |
| `accountants`, `accounting_sweeps`, `accounting_map` | ε by each accountant, and how tight it is |
| `accountant_price`, `sampling_schemes` | What a loose accountant costs; what each sampling scheme has |
| `tuning` | ε of the best of several runs beside that of one |
| `evidence` | What a GPU is to show, most telling first (`make gpu`) |

`python -m dpbench list` prints them with a line each; results/README.md has what was found.

## In a notebook

`dpbench.load("memory_speed")` gives the records as a tidy `pandas.DataFrame`, `dpbench.run("memory_speed", smoke=True)`
measures first.

## On a cluster

```sh
python -m dpbench run stress_test --executor ray --address HOST:6379   # or slurm: the same records
python -m dpbench plan stress_test --cluster cluster.toml              # its hours, cost, efficiency
```

The executors need an extra each: `pip install -e '.[ray]'` or `'.[slurm]'` in the repository.

## Memory that glibc hands back

After `export MALLOC_MMAP_MAX_=0 MALLOC_TRIM_THRESHOLD_=99999999999` the C library keeps its memory between steps. A
step took 0.65 to 1 of the time.

## One of your own

An experiment is a Python file with an `EXPERIMENT` (`dpbench.experiment`), and is run by its path:

```python
from dpbench.experiment import Experiment, grid
from dpbench.trials import StepTrial


def cells(device):
    return grid(StepTrial, model="cnn", backend=["nonprivate", "bk_mixed"], batch_size=32, device=device)


EXPERIMENT = Experiment(name="my_own", doc="What clipping costs on the CNN.", cells=cells, smoke=cells)
```
"""
