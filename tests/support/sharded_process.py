"""One process of several under DDP and FSDP2: `ranks.ranks`, or torchrun sharded_process.py FOLDER, which saves it."""

import contextlib
import sys
import warnings

import torch
import torch.distributed as dist
import torch.nn.functional as F
from ranks import end_of_rank
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from clipping import Flat, PerLayer, UnsupportedModel, load_backend
from dpbench import AdamBC, PrivacyEngine
from dpbench.conformance.cases import cross_entropy as loss_fn

SAMPLES = 7  # not a multiple of the processes


class Cnn(nn.Sequential):
    """Grouped convolutions, group norm, an in-place ReLU, and 5 output channels, which two shards split unevenly."""

    def __init__(self):
        block = [nn.Conv2d(4, 6, 3, padding=1, groups=2), nn.GroupNorm(2, 6), nn.ReLU(inplace=True)]
        super().__init__(
            nn.Conv2d(1, 4, 3), nn.GELU(), nn.Sequential(*block), nn.Conv2d(6, 5, 3), nn.Flatten(), nn.Linear(80, 3)
        )

    def blocks(self):
        return [self[2]]

    @staticmethod
    def batch(draw):
        return torch.randn(SAMPLES, 1, 8, 8, generator=draw, dtype=torch.float64)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.attend, self.out = nn.LayerNorm(8), nn.Linear(8, 24), nn.Linear(8, 8)
        self.gain = nn.Parameter(torch.ones(8))

    def forward(self, x):
        q, k, v = self.attend(self.norm(x)).chunk(3, -1)
        y = F.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None], is_causal=True)[:, 0]
        return x + self.out(y) * torch.tanh(self.gain)


class Gpt(nn.Module):
    """Head and embedding share one parameter of the root module, which also has a token, positions and a scale."""

    def __init__(self):
        super().__init__()
        self.tokens, self.first = nn.Embedding(11, 8), nn.Parameter(torch.randn(1, 1, 8))
        self.positions, self.scale = nn.Parameter(torch.randn(1, 6, 8)), nn.Parameter(torch.rand(3, 8))
        self.layers = nn.ModuleList([Block(), nn.TransformerEncoderLayer(8, 2, 12, 0.0, batch_first=True)])
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids):
        x = torch.cat([self.first.expand(len(ids), -1, -1), self.tokens(ids)], 1) + self.positions
        for layer in self.layers:
            x = layer(x)
        x = x * torch.softmax(self.scale, 0)[0] * self.scale[1].sigmoid()  # gradients need the parameter's values
        return self.head(x)[:, -1, :3].clone()  # FSDP warns of a view

    def blocks(self):
        return list(self.layers)

    @staticmethod
    def batch(draw):
        return torch.randint(0, 11, (SAMPLES, 5), generator=draw)


MODELS = {"cnn": Cnn, "gpt": Gpt}
CASES = [(model, "bk_mixed", "flat") for model in MODELS]
CASES += [("gpt", "bk_ghost", "flat"), ("gpt", "bk_mixed", "per_layer")]


def made(name, dtype=torch.float64):
    """(model, inputs, targets), the same in every process."""
    torch.manual_seed(3)
    model = MODELS[name]().to(dtype)
    draw = torch.Generator().manual_seed(5)
    x, y = MODELS[name].batch(draw), torch.randint(0, 3, (SAMPLES,), generator=draw)
    return model, (x.to(dtype) if x.is_floating_point() else x), y


def sharded(model, **options):
    for block in model.blocks():
        fully_shard(block, **options)
    return fully_shard(model, **options)


def replicated():
    """Two replicas of two shards (HSDP)."""
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))


def whole(grads):
    return {name: g.full_tensor() if hasattr(g, "full_tensor") else g for name, g in grads.items()}


def clipped(case, rank=0, processes=1, how="alone", empty=False):
    """Call a backend twice on this process's samples: (gradients, norms). `empty`: the last process has no samples."""
    name, backend, clip = case
    model, x, y = made(name)
    clip = PerLayer(max_grad_norm=0.4) if clip == "per_layer" else Flat(max_grad_norm=0.4)
    if how == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    elif how != "alone":
        sharded(model, **({"mesh": replicated()} if how == "hsdp" else {}))
    share = processes - 1 if empty else processes
    mine = slice(rank, None, share) if rank < share else slice(0, 0)
    with load_backend(backend)(model, loss_fn, clip=clip) as run:
        run(x[mine], y[mine])
        out = run(x[mine], y[mine])
    assert all(p.grad is None for p in model.parameters())
    return whole(out.grads), out.norms


def mixed():
    """(gradients, norms) with bfloat16 forward and backward passes and float32 shards."""
    model, x, y = made("gpt", torch.float32)
    sharded(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))
    rank, processes = dist.get_rank(), dist.get_world_size()
    with load_backend("bk_mixed")(model, loss_fn, clip=Flat(max_grad_norm=0.4)) as run:
        out = run(x[rank::processes], y[rank::processes])
    return whole(out.grads), out.norms


def refusals():
    """Each backend's error for a sharded model; "" if it accepts the model."""
    said = {}
    for backend in ("nonprivate", "microbatch", "vmap", "ghost", "mixed_ghost", "fastgradclip", "bk_ghost"):
        model, *_ = made("cnn")
        try:
            load_backend(backend)(sharded(model), loss_fn).close()
            said[backend] = ""
        except UnsupportedModel as error:
            said[backend] = str(error)
    model, *_ = made("cnn")
    fully_shard(model[2])
    with contextlib.suppress(UnsupportedModel):
        load_backend("bk_mixed")(model, loss_fn)
        said["part"] = ""
    return said


def train(how="alone", noise=0.0, seed=7, batch_size=3):
    """Train one epoch in pieces of small Poisson batches, some empty in a process: (parameters, sizes of pieces)."""
    model, x, y = made("gpt")
    called = model
    if how == "ddp":
        called = nn.parallel.DistributedDataParallel(model)
    elif how != "alone":
        sharded(model, **({"mesh": replicated()} if how == "hsdp" else {}))
    optimizer = AdamBC(model.parameters(), lr=0.05)  # also shards its state
    engine = PrivacyEngine(
        called,
        batch_size=batch_size,
        sample_size=28,
        max_grad_norm=0.5,
        noise_multiplier=noise,
        generator=None if seed is None else torch.Generator().manual_seed(seed),
    )
    with warnings.catch_warnings(action="ignore"):
        engine.attach(optimizer)
    data = torch.utils.data.TensorDataset(x.repeat(4, 1), y.repeat(4))
    sizes = []
    for xs, ys in engine.data_loader(data, max_physical_batch_size=2):
        sizes.append(int(engine.mask.sum()))  # a sharded model's batches are padded
        optimizer.step(loss=loss_fn(called(xs), ys))
    model.eval()
    with torch.no_grad():
        called(x)  # gathers the root of a sharded model
    engine.detach()
    if how in ("fsdp", "hsdp"):
        model.reshard()
    return whole({name: p.detach() for name, p in model.named_parameters()}), sizes


def noise(**options):
    """Take one step from zero parameters with zero gradients: returns the noise, of the same key in all processes."""
    model = nn.Sequential(nn.Linear(300, 101), nn.Linear(101, 3)).double()
    for p in model.parameters():
        nn.init.zeros_(p)
    fully_shard(model, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=4.0)
    engine = PrivacyEngine(model, batch_size=4, sample_size=40, max_grad_norm=0.5, noise_multiplier=3.0)
    box = [engine.state_dict()]
    dist.broadcast_object_list(box, src=0)
    engine.load_state_dict(box[0], replay=True)
    engine.attach(optimizer)
    rows = torch.zeros(2, 300, dtype=torch.float64)
    optimizer.step(loss=model(rows).sum(1) * 0)
    engine.detach()
    return torch.cat([p.full_tensor().detach().flatten() for p in model.parameters()])


def main(folder):
    """Sums of each case, what is refused, training and noise."""
    dist.init_process_group("gloo")
    rank, processes = dist.get_rank(), dist.get_world_size()
    found = {"alike": {}, "refusals": refusals(), "mixed": mixed()}
    for how in ("ddp", "fsdp", *(["hsdp"] if processes == 4 else [])):
        for case in CASES:
            found["alike"][how, case, False] = clipped(case, rank, processes, how)
        for name in MODELS:
            case = (name, "bk_mixed", "flat")
            found["alike"][how, case, True] = clipped(case, rank, processes, how, empty=True)
        found[how] = train(how), train(how, noise=1.0)
    if processes == 4:
        found["replicas"] = noise(mesh=replicated())
    return found | {"noise": noise()}


if __name__ == "__main__":
    end_of_rank(main(sys.argv[1]), sys.argv[1])
