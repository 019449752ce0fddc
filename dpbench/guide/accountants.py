"""Accountants: compute the ε of a run, and say whether the number is a bound.

## On the command line

```sh
python -m dpbench epsilon --sample-rate 0.01 --noise-multiplier 4 --steps 10000 --delta 1e-5
python -m dpbench calibrate --target-epsilon 1 --sample-rate 0.01 --steps 10000 --delta 1e-5
```

The first prints the ε of a run by every accountant, the second the noise that a target ε needs.

## In Python

```python
from accounting import SubsampledGaussian, calibrate_noise_multiplier, load_accountant

step = SubsampledGaussian(noise_multiplier=4.0, sample_rate=0.01)
load_accountant("prv").epsilon(step, steps=10_000, delta=1e-5)  # 0.947
calibrate_noise_multiplier("prv", target_epsilon=1.0, sample_rate=0.01, steps=10_000, delta=1e-5)  # 3.813
```

`accounting` needs only numpy and scipy, not torch. `Accountant.guarantee` returns ε with its kind.

## Which one

| accountant | method | its number is |
|---|---|---|
| `prv` | composes the privacy loss numerically, certified from both sides; the engine's default | an upper bound |
| `pld` | the same with dp-accounting's privacy loss distributions | an upper bound |
| `rdp` | Rényi differential privacy, over all orders | an upper bound |
| `moments` | the moments accountant of 2016, orders 1 to 32 | an upper bound |
| `strong`, `simple` | composition theorems | an upper bound |
| `gdp` | the Gaussian limit of many steps | an estimate |
| `best` | the smallest valid bound of all, beside the certified lower bound | an upper bound |

**An estimate is not a guarantee**: it can lie below the true ε. Every output states the kind. `prv:lower` is a
certified lower bound; if it is close to the upper bound, no tighter accountant is worth a search.

## What ε depends on

| | | |
|---|---|---|
| σ | noise multiplier | ε falls as σ grows |
| q = b/n | sample rate | ε grows with q: small batches hide records |
| T | steps | ε grows about as √T |
| δ | the allowed probability of exceeding ε | well below 1/n |

The bound depends on how batches are drawn. Poisson samples, truncated Poisson samples, balls and bins, draws without
replacement, one pass and shuffled passes (`accounting.SAMPLINGS`) each have their own bound, or an error that says
there is none. So do the adjacencies (add or remove a record, zero it out, replace it): `accounting.ADJACENCIES`.

`--sampling balls_and_bins` (random allocation) puts each record into one random batch of every epoch. Its ε is about
that of Poisson samples, and every epoch uses every record. `prv` has the bound with amplification; the other
accountants count an epoch as one Gaussian step.

## Other questions

| question | answer |
|---|---|
| What can an attack on membership reach? | `epsilon --risk`; `calibrate --target-tpr` takes it as the target |
| And if steps differ? | `epsilon phases.toml`, below |
| And if the best of several runs is published? | `--tuned N` |
| And for all records of a person? | `--group-size K` |

A file of phases has a `[[phase]]` for each kind of steps; fields above the first hold for all:

```toml
delta = 1e-5
dataset_size = 60_000

[[phase]]
batch_size = 256
noise_multiplier = 1.1
epochs = 10

[[phase]]
sample_rate = 0.01
noise_multiplier = 2
steps = 500
```

```python
from accounting import compose, risk

other = SubsampledGaussian(noise_multiplier=2.0, sample_rate=0.01)
compose("prv", [(step, 10_000), (other, 500)]).epsilon(delta=1e-5)  # 1.059
risk("prv", step, steps=10_000, delta=1e-5)["advantage"]  # 0.101
```

## Is the claim true?

An accountant trusts the code to do what it says. `python -m dpbench run audit` attacks runs with canaries and
certifies a lower bound on ε. It refutes none of 120 honest runs, and finds 22 of 22 seeded faults.

## One of your own

Write a subclass of `accounting.Accountant`; CONTRIBUTING.md has the recipe.
"""
