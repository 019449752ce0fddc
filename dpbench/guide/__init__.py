"""dpbench trains PyTorch models with differential privacy and measures the cost of each method.

- **DP-SGD** clips the gradient of every record to a threshold, sums the clipped gradients, and adds noise. ε bounds
  what the trained model can reveal about any one record.
- A **per-sample gradient** is the gradient of one record's loss. An ordinary backward pass returns only their sum.
- A **clipping backend** computes the clipped sum. All backends return the same result; time and memory differ.

## What do you want?

**Train a model privately.** Start at `dpbench.guide.engine`: make the optimizer private in two lines, or keep your loop
of Opacus, transformers' Trainer, Lightning or accelerate. Then read `dpbench.integrations.sharp_edges`.

**Choose a backend** for a model on a machine:

```sh
python -m dpbench template mine.py          # a file for your own model and batch
python -m dpbench recommend mine.py:build   # which backend for it, and why
```

**Measure**, or repeat a measurement: `dpbench.guide.experiments`.

**Compute the ε of a run**, or the noise that it needs: `dpbench.guide.accountants`.

## Pages

| page | answers |
|---|---|
| `dpbench.guide.algorithms` | What is a ghost norm? What is in memory when? |
| `dpbench.guide.engine` | How do I train my own model? |
| `dpbench.guide.backends` | Which backends are there, and what does each refuse? |
| `dpbench.guide.accountants` | How is ε computed, and is it a bound? |
| `dpbench.guide.experiments` | What can be measured, and how is it run? |
| `dpbench.integrations.sharp_edges` | Which mistakes break the guarantee, and how does dpbench answer? |

**Tutorials** are programs to read from top to bottom, and to run:
`dpbench.integrations.tutorials.digits` (Lightning), `dpbench.integrations.tutorials.from_opacus`,
`dpbench.integrations.tutorials.memorisation` (transformers and LoRA),
`dpbench.integrations.tutorials.user_level` (protect a person, not a record).

**The interface** has a page for each public module: `dpbench`, `clipping`, `accounting`, and the integrations.
CONTRIBUTING.md and the [internal pages](../internal/index.html) describe the code itself.
"""
