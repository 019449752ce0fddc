r"""The algorithms: per-sample gradients, and how to clip them without having them.

## The step

Let $$\ell_i(\theta)$$ be the loss of record i among the B records of a batch, and $$g_i = \partial \ell_i / \partial
\theta$$ its gradient: the **per-sample gradient**. A step of DP-SGD (Abadi et al. 2016, arXiv:1607.00133) is

$$\theta \leftarrow \theta - \frac{\eta}{b} \left( \sum_{i=1}^{B} c_i\, g_i + \sigma C\, \mathcal{N}(0, I) \right),
\qquad c_i = \min\left(1, \frac{C}{\Vert g_i \Vert}\right)$$

with the clipping threshold C, the noise multiplier σ and the *expected* size b of a batch. No record moves the sum by
more than C, so noise of σC hides whether it was there. Everything that follows is about the sum. It needs the factor
$$c_i$$ of every record, hence the norm of every per-sample gradient over *all* layers together; ordinary training
never forms these gradients.

## A linear layer

Record i gives the layer an input $$a_i$$ of T rows (tokens, or patches of an image) and d columns. With the weight W
(d × p) its output is $$s_i = a_i W$$, T × p. The backward pass brings the gradient of the output,
$$e_i = \partial \ell_i / \partial s_i$$, also T × p. Then

$$g_i = a_i^{\mathsf{T}} e_i \quad (d \times p), \qquad \sum_i g_i = \sum_i a_i^{\mathsf{T}} e_i = A^{\mathsf{T}} E$$

where A and E stack the rows of all records. Ordinary training computes the sum by the single product on the right, and
the B matrices in it never exist.

A convolution is a linear layer on patches: T is the number of output pixels, d the size of a patch. An embedding is
one, too, with one-hot rows as inputs.

## Four ways to the clipped sum

### 1. Instantiate every gradient

Compute all $$g_i$$, take their norms, add them up with their factors. Opacus' hooks do so, and `vmap`. It is simple,
and it needs B times the memory of the model's gradients: B d p numbers for each layer. **FastGradClip** forms them one
layer at a time, keeps only the norms, and runs a second backward pass of the weighted loss $$\Sigma_i\, c_i\, \ell_i$$,
whose gradient is the clipped sum.

### 2. Ghost norm

The norm can be had without the gradient (Goodfellow 2015, arXiv:1510.01799; Li et al. 2021, arXiv:2110.05679):

$$\Vert g_i \Vert^2 = \Vert a_i^{\mathsf{T}} e_i \Vert^2 = \sum_{s=1}^{T} \sum_{t=1}^{T} (a_{is} \cdot a_{it})\,
(e_{is} \cdot e_{it})$$

These are two Gram matrices of T × T, multiplied entry by entry and added up. They take $$2\,T^2$$ numbers for a record
in place of $$d\,p$$, and $$2\,T^2 (d + p)$$ operations in place of $$2\,T d\,p$$. A second backward pass of the
weighted loss gives the sum.

### 3. Mixed ghost clipping

A ghost norm is cheap where T is small: deep in a convolutional net, or in a layer without positions. In the first
layers of a net for images T is the number of pixels, and the Gram matrices are larger than any gradient. Mixed ghost
clipping (Bu et al. 2022, arXiv:2205.10683) decides layer by layer:

$$2\,T^2 \leq d\,p \; : \quad \mathrm{ghost\ norm}; \qquad \mathrm{otherwise:\quad instantiate}\ g_i$$

`python -m dpbench explain MODEL` prints T, d, p and the decision for every layer.

### 4. Book-keeping

The second backward pass repeats work. Once all factors are known, a layer's clipped sum is

$$\sum_i c_i\, g_i = \sum_i a_i^{\mathsf{T}} (c_i\, e_i) = A^{\mathsf{T}}\, \mathrm{diag}(c)\, E$$

one product, as large as ordinary training's own (Bu et al. 2022, arXiv:2210.00038). So keep a and e of every layer
until the last norm is known, scale the rows of e, and multiply. The forward pass, the gradients of the activations and
one product for each weight are what ordinary training does as well: only the norms are new work. The price is memory
for the e of all layers, which ordinary training frees as it goes.

`bk_mixed` is book-keeping with a planner. For each layer it knows several exact ways to the norm, times them on the
machine, and takes the fastest that keep no more than a and e. Where a Gram norm is taken, e is kept; where a gradient
was instantiated for its norm, it is either kept for the sum or formed again.

## What is in memory when

![Bytes alive during one step, by backend](memory.svg)

*Memory beside the parameters while one step runs, simulated with tensors that have shapes and no data. Left of the
dashed line is the forward pass, right of it one or two backward passes; the grey line is ordinary training's.*

| | first backward pass | after it | second backward pass |
|---|---|---|---|
| ordinary training | the activations go, one layer's e at a time | the sum | – |
| `vmap`, Opacus' hooks | the gradients of all records, of all layers | their weighted sum | – |
| `fastgradclip` | the gradients of all records, of one layer | norms [B] | as ordinary training |
| `ghost` | two Gram matrices a record, of one layer | norms [B] | as ordinary training |
| `mixed_ghost` | the smaller of the two, of one layer | norms [B] | as ordinary training |
| `bk_ghost`, `bk_mixed` | the same; a and e of the layers behind it stay | their products | – |

## What it costs

For a linear layer and a batch, in products of 2 B T d p operations. Ordinary training has three: the output, the
gradient of the input, the gradient of the weight.

| | products | norms beside them |
|---|---|---|
| ordinary training | 3 | – |
| instantiated, all at once | 3, in B small ones | B d p numbers are written and read |
| FastGradClip | 5: the gradient of the input and of the weight twice | the first of the weight's, in B small ones |
| ghost, mixed ghost | 4: the gradient of the input twice | Gram matrices; mixed: or as FastGradClip |
| book-keeping | 3 | the same as of the two above |

## Details that decide whether it is right

- **A parameter used twice** (tied embeddings, a recurrent layer) has one gradient. Its norm has cross terms, and is not
  the root of the sum of the squares of the uses.
- **A bias** has the gradient $$\Sigma_t\, e_{it}$$, a norm layer's scale $$\Sigma_t\, x_{it}\, e_{it}$$: small, and
  always instantiated.
- **Records must not mix.** If the loss of one depends on another (batch norm, a mean over the batch) there is no
  per-sample gradient. Such a model is refused.
- **In floating point** a Gram norm can cancel: large terms of both signs whose sum is rounding. A record made for it
  moved the sum of every ghost clipping library by 10,000 C. `clipping.numerics.rounding_bounds` has the bound that is
  used here in place of the bare norm.
"""
