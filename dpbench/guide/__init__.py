"""dpbench trains PyTorch models with differential privacy and measures the cost of each method.

- **DP-SGD** clips the gradient of every record to a threshold, sums the clipped gradients, and adds noise. ε bounds
  what the trained model can reveal about any one record.
- A **per-sample gradient** is the gradient of one record's loss. An ordinary backward pass returns only their sum.
- A **clipping backend** computes the clipped sum. All backends return the same result; time and memory differ.

## What do you want?

| to | page |
|---|---|
| train a model privately, in your own loop or another library's | `dpbench.guide.engine` |
| know which mistakes break the guarantee, and how dpbench answers | `dpbench.integrations.sharp_edges` |
| choose a backend for a model on a machine, and know what each refuses | `dpbench.guide.backends` |
| compute the ε of a run, or the noise that it needs | `dpbench.guide.accountants` |
| measure, or repeat a measurement | `dpbench.guide.experiments` |
| understand ghost norms, and what is in memory when | `dpbench.guide.algorithms` |

**Tutorials** are programs to read from top to bottom, and to run:
`dpbench.integrations.tutorials.digits` (Lightning), `dpbench.integrations.tutorials.from_opacus`,
`dpbench.integrations.tutorials.memorisation` (transformers and LoRA),
`dpbench.integrations.tutorials.user_level` (protect a person, not a record).

**The interface** has a page for each public module: `dpbench`, `clipping`, `accounting`, and the integrations.
CONTRIBUTING.md and the [internal pages](../internal/index.html) describe the code itself.
"""
