r"""The algorithms: clip per-sample gradients without forming them.

## The step

Let $$\ell_i(\theta)$$ be the loss of record i among the B records of a batch, and $$g_i = \partial \ell_i / \partial
\theta$$ its gradient: the **per-sample gradient**. A step of DP-SGD (Abadi et al. 2016, arXiv:1607.00133) is

$$\theta \leftarrow \theta - \frac{\eta}{b} \left( \sum_{i=1}^{B} c_i\, g_i + \sigma C\, \mathcal{N}(0, I) \right),
\qquad c_i = \min\left(1, \frac{C}{\Vert g_i \Vert}\right)$$

with the clipping threshold C, the noise multiplier σ and the *expected* size b of a batch. No record moves the sum by
more than C, so noise of σC hides whether it was there. The rest of this page is about the sum. It needs the factor
$$c_i$$ of every record, and so the norm of every per-sample gradient over *all* layers together. Ordinary training
never forms these gradients.

## A linear layer

For record i the layer's input $$a_i$$ has T rows (tokens, or patches of an image) and d columns. With the weight W
(d × p) its output is $$s_i = a_i W$$, T × p. The backward pass computes the gradient of the output,
$$e_i = \partial \ell_i / \partial s_i$$, also T × p. Then

$$g_i = a_i^{\mathsf{T}} e_i \quad (d \times p), \qquad \sum_i g_i = \sum_i a_i^{\mathsf{T}} e_i = A^{\mathsf{T}} E$$

where A and E stack the rows of all records. Ordinary training computes the sum by the single product on the right and
never forms the B matrices.

A convolution is a linear layer on patches: T is the number of output pixels, d the size of a patch. An embedding is a
linear layer with one-hot rows as inputs.

## Four ways to the clipped sum

### 1. Instantiate every gradient

Compute all $$g_i$$, take their norms, and sum them with their factors, as Opacus' hooks and `vmap` do. This is simple,
and needs B times the memory of the model's gradients: B d p numbers for each layer. **FastGradClip** forms them one
layer at a time and keeps only the norms. A second backward pass of the weighted loss $$\Sigma_i\, c_i\, \ell_i$$ then
gives the clipped sum.

### 2. Ghost norm

The norm does not need the gradient (Goodfellow 2015, arXiv:1510.01799; Li et al. 2021, arXiv:2110.05679):

$$\Vert g_i \Vert^2 = \Vert a_i^{\mathsf{T}} e_i \Vert^2 = \sum_{s=1}^{T} \sum_{t=1}^{T} (a_{is} \cdot a_{it})\,
(e_{is} \cdot e_{it})$$

This multiplies two T × T Gram matrices entry by entry and sums the products. For each record it takes $$2\,T^2$$
numbers instead of $$d\,p$$, and $$2\,T^2 (d + p)$$ operations instead of $$2\,T d\,p$$. A second backward pass of the
weighted loss gives the sum.

### 3. Mixed ghost clipping

A ghost norm is cheap if T is small: deep in a convolutional network, or in a layer without positions. In the first
layers of an image network T is the number of pixels, and the Gram matrices are larger than any gradient. Mixed ghost
clipping (Bu et al. 2022, arXiv:2205.10683) decides layer by layer:

$$2\,T^2 \leq d\,p \; : \quad \mathrm{ghost\ norm}; \qquad \mathrm{otherwise:\quad instantiate}\ g_i$$

`python -m dpbench explain MODEL` prints T, d, p and the decision for every layer.

### 4. Book-keeping

The second backward pass repeats work. Once all factors are known, a layer's clipped sum is

$$\sum_i c_i\, g_i = \sum_i a_i^{\mathsf{T}} (c_i\, e_i) = A^{\mathsf{T}}\, \mathrm{diag}(c)\, E$$

one product of the same size as ordinary training's (Bu et al. 2022, arXiv:2210.00038). So keep a and e of every layer
until all norms are known, scale the rows of e, and multiply. Ordinary training also computes the forward pass, the
gradients of the activations and one product for each weight; only the norms are extra work. The price is memory for
the e of all layers, which ordinary training frees as it goes.

`bk_mixed` is book-keeping with a planner. For each layer the planner times several exact ways to compute the norm on
the machine. It takes the fastest that keep no more than e. A layer with a Gram norm keeps e. A layer that
instantiates gradients either keeps them for the sum or forms them again.

## What is in memory when

![Bytes alive during one step, by backend](memory.svg)

*Memory in addition to the parameters during one step, simulated with tensors that have shapes but no data. The dashed
line separates the forward pass from the one or two backward passes. The grey line is ordinary training.*

| | first backward pass | after it | second backward pass |
|---|---|---|---|
| ordinary training | frees the activations; e of one layer at a time | the sum | – |
| `vmap`, Opacus' hooks | per-sample gradients of all layers | their weighted sum | – |
| `fastgradclip` | per-sample gradients of one layer | norms [B] | as ordinary training |
| `ghost` | two Gram matrices a record, of one layer | norms [B] | as ordinary training |
| `mixed_ghost` | the smaller of the two, of one layer | norms [B] | as ordinary training |
| `bk_ghost`, `bk_mixed` | the same, and a and e of finished layers | their products | – |

## What it costs

The cost of a linear layer on one batch, counted in matrix products of 2 B T d p operations. Ordinary training computes
three: the output, the gradient of the input, and the gradient of the weight.

| | products | cost of the norms |
|---|---|---|
| ordinary training | 3 | – |
| all gradients instantiated | 3, one as B small products | B d p numbers are written and read |
| FastGradClip | 5: both gradients twice | the first gradient of the weight is B small products |
| ghost, mixed ghost | 4: the gradient of the input twice | Gram matrices; mixed: or as FastGradClip |
| book-keeping | 3 | as for ghost and mixed ghost |

## Details that matter for exactness

- **A parameter used twice** (tied embeddings, a recurrent layer) has one gradient, the sum over its uses. The squared
  norm has cross terms; adding up the squared norms of the uses misses them.
- **A bias** has the gradient $$\Sigma_t\, e_{it}$$, and the scale of a norm layer $$\Sigma_t\, x_{it}\, e_{it}$$. Both
  are small and always instantiated.
- **Records must not mix.** If the loss of one record depends on another (batch norm, a mean over the batch), there is
  no per-sample gradient. Such a model is refused.
- **In floating point** a Gram norm can cancel: large terms of both signs may leave only rounding error. A record built
  for it moved the sum of every ghost clipping library by 10,000 C. dpbench clips by an upper bound instead of the bare
  norm: `clipping.numerics.rounding_bounds`.
"""
