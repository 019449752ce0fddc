"""dpbench trains PyTorch models with differential privacy, and measures what each way of doing so costs.

- **DP-SGD** clips the gradient of every record to a threshold, adds them up, and adds noise. ε bounds what the trained
  model can tell about any one record.
- A **per-sample gradient** is the gradient of one record's loss. An ordinary backward pass gives their sum alone.
- A **clipping backend** finds the clipped sum. Backends agree in the result, and differ in time and memory.

## What do you want?

**Train a model privately.** Start at `dpbench.guide.engine`: make the optimizer private in two lines, or keep the loop
of Opacus, transformers' Trainer, Lightning or accelerate. Then read `dpbench.integrations.sharp_edges`.

**Know which backend to use** for a model on a machine:

```sh
python -m dpbench template mine.py          # a file to put your own model and batch in
python -m dpbench recommend mine.py:build   # which backend for it, and why
```

**Measure**, or repeat what was measured: `dpbench.guide.experiments`.

**Know what ε a run has**, or how much noise it needs: `dpbench.guide.accountants`.

## Pages

| page | answers |
|---|---|
| `dpbench.guide.algorithms` | What is a ghost norm? What is in memory when? |
| `dpbench.guide.engine` | How do I train a model of mine? |
| `dpbench.guide.backends` | Which backends are there, and what does each refuse? |
| `dpbench.guide.accountants` | How is ε computed, and is it a bound? |
| `dpbench.guide.experiments` | What can be measured, and how is it run? |
| `dpbench.integrations.sharp_edges` | What breaks the guarantee, and what happens then? |

**Tutorials** are programs to read from the first line to the last, and to run:
`dpbench.integrations.tutorials.digits` (Lightning), `dpbench.integrations.tutorials.from_opacus`,
`dpbench.integrations.tutorials.memorisation` (transformers and LoRA),
`dpbench.integrations.tutorials.user_level` (protect a person, not a record).

**The interface** has a page for each public module: `dpbench`, `clipping`, `accounting`, and the integrations. How the
code itself is built stands in CONTRIBUTING.md and in the [internal pages](../internal/index.html).
"""
