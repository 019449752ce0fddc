"""Accountants: what ε a run has, and whether the number is a bound.

## On the command line

```sh
python -m dpbench epsilon --sample-rate 0.01 --noise-multiplier 4 --steps 10000 --delta 1e-5
python -m dpbench calibrate --target-epsilon 1 --sample-rate 0.01 --steps 10000 --delta 1e-5
```

The first says what ε a run has, by every accountant; the second how much noise a target ε needs.

## In Python

```python
from accounting import SubsampledGaussian, calibrate_noise_multiplier, load_accountant

step = SubsampledGaussian(noise_multiplier=4.0, sample_rate=0.01)
load_accountant("prv").epsilon(step, steps=10_000, delta=1e-5)  # 0.947
calibrate_noise_multiplier("prv", target_epsilon=1.0, sample_rate=0.01, steps=10_000, delta=1e-5)  # 3.813
```

`accounting` needs numpy and scipy alone, and no torch. `Accountant.guarantee` gives ε with its kind.

## Which one

| accountant | what it does | its number is |
|---|---|---|
| `prv` | composes the privacy loss numerically, certified from both sides; the engine's default | an upper bound |
| `pld` | the same with dp-accounting's privacy loss distributions | an upper bound |
| `rdp` | Rényi differential privacy, over all orders | an upper bound |
| `moments` | the moments accountant of 2016, orders 1 to 32 | an upper bound |
| `strong`, `simple` | composition theorems | an upper bound |
| `gdp` | the Gaussian limit of many steps | an estimate |
| `best` | the smallest valid bound of all, beside the certified lower bound | an upper bound |

**An estimate is not a guarantee**: it can lie below the truth. Every output says the kind. `prv:lower` is a certified
lower bound: between it and the upper bound lies the true ε, which tells whether a tighter accountant is worth a search.

## What ε depends on

| | | |
|---|---|---|
| σ | noise multiplier | ε falls as σ grows |
| q = b/n | sample rate | ε grows with q: small batches hide records |
| T | steps | ε grows about as √T |
| δ | the probability that is given up | well below 1/n |

The scheme by which batches are drawn is part of the theorem. Poisson samples, truncated ones, balls and bins, draws
without replacement, one pass and shuffled passes each have a bound of their own, or a line that says there is none;
so have the adjacencies (a record more or less, made zero, replaced): `accounting.ADJACENCIES`, `accounting.SAMPLINGS`.

`--sampling balls_and_bins` (random allocation) puts each record into one batch of every epoch, drawn for it alone. Its
ε is about that of Poisson samples, and no record is left out of an epoch. `prv` has the bound with amplification; the
other accountants count an epoch as one Gaussian step.

## Is the claim true?

An accountant trusts that the code does what it says. `python -m dpbench run audit` attacks runs with canaries, and
certifies a lower bound on ε from what it finds: it refutes none of 100 honest runs, and finds 22 of 22 seeded faults.

## One of your own

Write a subclass of `accounting.Accountant`; CONTRIBUTING.md has the recipe.
"""
