"""The cost of private training by sequence length: a GPT-2-like model at 128 to 16384 tokens.

The batch falls as sequences grow. On a CPU the model is smaller (2 layers, 256 wide), and beyond 2048 tokens backends
that always form Gram matrices are left out, so that the experiment ends in a quarter of an hour on two cores. On CUDA
it is the model of the overhead experiment (6 layers, 384 wide).
"""

from dpbench.experiment import TINY_GPT2, UNTIED, UNTIED_GPT2, experiment_of, grid, ratios
from dpbench.trials import OverheadTrial

SMALL = f"transformers:gpt2?n_layer=2&n_embd=256&n_head=4&vocab_size=1024&{UNTIED}"
BACKENDS = ("nonprivate", "fastgradclip", "ghost", "mixed_ghost", "bk_ghost", "bk_mixed", "opacus_ghost")
WITHOUT_GRAMS = ("nonprivate", "mixed_ghost", "bk_mixed")
#: Tokens -> (batch size on a CPU, on CUDA).
LENGTHS = {128: (16, 128), 512: (4, 32), 2048: (2, 8), 8192: (2, 4), 16384: (2, 2)}
#: On a CPU a step of this many tokens takes 20 seconds.
LONGEST = 16384


def _of_length(model: str, tokens: int) -> str:
    """The reference for sequences of `tokens`; raises the limit of positions beyond GPT-2's 1024."""
    return f"{model}&max_position_embeddings={tokens}@{tokens}" if tokens > 1024 else f"{model}@{tokens}"


def _backends(tokens: int, cuda: bool) -> tuple[str, ...]:
    """The backends that are fast enough for sequences of this length."""
    if cuda or tokens <= 2048:
        return BACKENDS
    return WITHOUT_GRAMS if tokens < LONGEST else ("nonprivate", "bk_mixed")


def cells(device: str) -> list[OverheadTrial]:
    cuda = device == "cuda"
    same = {"image_size": None, "data": "synthetic", "max_seconds": 4.0, "device": device}
    model = UNTIED_GPT2 if cuda else SMALL
    found = []
    for tokens, batch_sizes in LENGTHS.items():
        rounds = 15 if cuda else 5 if tokens < LONGEST else 3
        one = {"model": _of_length(model, tokens), "backends": _backends(tokens, cuda), "batch_size": batch_sizes[cuda]}
        found += grid(OverheadTrial, rounds=rounds, **one, **same)
    return found


def smoke(device: str) -> list[OverheadTrial]:
    some = {"backends": ("nonprivate", "mixed_ghost", "bk_mixed"), "batch_size": 2, "image_size": None}
    few = {"data": "synthetic", "rounds": 2, "max_seconds": 0.2, "device": device}
    return grid(OverheadTrial, model=[_of_length(TINY_GPT2, tokens) for tokens in (16, 64, 256)], **some, **few)


EXPERIMENT = experiment_of(
    __name__, rounds=1, figures=("sequence_length", "claims"), table=ratios("sequence_length", "Tokens")
)
