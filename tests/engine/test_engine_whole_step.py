"""Steps of the engine in one call, as they are and as graphs: what is clipped, noised and counted is the same."""

import random
from contextlib import nullcontext
from functools import partial

import numpy as np
import pytest
import torch
from attached import attached, cross_entropy, parameters
from torch import nn
from torch.nn.modules.module import register_module_forward_hook
from torch.utils.data import TensorDataset

import clipping.program.graphs
from clipping import Automatic, Flat, UnsupportedModel
from dpbench import Misuse
from dpbench.conformance.modules import Net
from dpbench.engine.adjust import set_clip


def network():
    torch.manual_seed(0)
    layers = nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.Tanh(), nn.Flatten(), nn.Dropout(0.2), nn.Linear(64, 3)
    return nn.Sequential(*layers).double()


def data(size=40):
    numbers = torch.Generator().manual_seed(2)
    x = torch.randn(size, 1, 6, 6, dtype=torch.float64, generator=numbers)
    return TensorDataset(x, torch.randint(0, 3, (size,), generator=numbers))


def make(model=None, **changes):
    model = network() if model is None else model
    settings = {"batch_size": 9, "sample_size": 40, "max_grad_norm": 0.5, "generator": torch.Generator().manual_seed(1)}
    model, optimizer, engine = attached(model, partial(torch.optim.SGD, momentum=0.9), 0.3, **settings | changes)
    return engine, optimizer


def weights(engine):
    return parameters(engine.model)


def train(engine, step, epochs=2, **loading):
    torch.manual_seed(5)
    for _ in range(epochs):
        for x, y in engine.data_loader(data(), **loading):
            losses = step(x, y)
            assert losses.shape == (len(x),)
            assert not losses.requires_grad
    return weights(engine)


def own_batches():
    """Compiled steps of batches that are the caller's, of one size."""
    engine, optimizer = make(sampling="shuffled", batch_size=8)
    x, y = (each[:8].clone() for each in data().tensors)
    return engine, optimizer, engine.make_step(cross_entropy, compile=True), x, y


def by_hand(engine, optimizer):
    """What everybody writes."""

    def step(x, y):
        losses = cross_entropy(engine.model(x), y)
        optimizer.step(loss=losses)
        return losses.detach()

    return step


PADDED = {"max_physical_batch_size": 4, "pad": True}


@pytest.mark.parametrize(
    ("compile", "loading", "clip"),
    [
        *((False, {}, "flat"), (False, PADDED, "automatic"), (False, PADDED, "per_layer")),
        *((True, {}, "flat"), (True, PADDED, "flat"), (True, PADDED, "per_layer")),
    ],
    ids=str,
)
def test_the_same_training_bit_for_bit(compile, loading, clip):
    """With noise, momentum and dropout, pieces and empty batches; of a generator, so that nothing is timed."""
    engine, optimizer = make(clip=clip)
    wanted = train(engine, by_hand(engine, optimizer), **loading)
    other, _ = make(clip=clip)
    step = other.make_step(cross_entropy, compile=compile)
    found = train(other, step, **loading)
    if compile and loading:
        assert list(step.graphs.ways.values()) == ["traced"] * 2
        assert step.graphs.steps > 5
    assert torch.equal(found, wanted)
    assert (other.steps, other.drawn) == (engine.steps, engine.drawn) == (10, 10)
    assert other.privacy_spent().epsilon == engine.privacy_spent().epsilon


class Odd(nn.Module):
    """Does what it is told by its attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.inner = nn.Linear(5, 3), nn.Tanh()
        self.mixes, self.scale, self.count = False, 1.0, 0
        self.register_buffer("seen", torch.zeros(()))
        self.written = torch.zeros(())

    def forward(self, x):
        self.seen = self.seen + 1
        self.written += 1
        self.count += self.count < 4
        fading = torch.exp(-self.seen / 9 - self.written / 7)
        x = self.inner(self.layer(x)) * self.scale * fading * (2 if self.count == 3 else 1)
        return x + x.mean(0, keepdim=True) if self.mixes else x


def test_a_model_that_begins_to_mix_samples_is_captured_anew_and_refused():
    engine, _ = make(Odd(), batch_size=6, sampling="shuffled")
    step = engine.make_step(cross_entropy, compile=True)
    x, y = torch.randn(6, 5), torch.randint(3, (6,))
    for _ in range(9):
        step(x, y)
    assert step.graphs.steps > 0
    engine.model.mixes = True
    with pytest.raises(UnsupportedModel, match="samples mix"):
        step(x, y)


CHANGES = {
    "nothing": lambda engine, losses: None,
    "a number in the model": lambda engine, losses: setattr(engine.model, "scale", 0.5),
    "a module": lambda engine, losses: setattr(engine.model, "inner", nn.Softsign()),
    "a buffer": lambda engine, losses: setattr(engine.model, "seen", torch.full((), 20.0)),
    "the loss": lambda engine, losses: losses.append(lambda outputs, targets: 3 * cross_entropy(outputs, targets)),
    "a hook of all modules": lambda engine, losses: register_module_forward_hook(
        lambda module, x, y: y * 2 if isinstance(module, nn.Linear) else None
    ),
    "a hook": lambda engine, losses: engine.model.layer.register_forward_hook(lambda module, x, y: y * 2),
    "a frozen parameter": lambda engine, losses: engine.model.layer.bias.requires_grad_(False),
    "the threshold": lambda engine, losses: object.__setattr__(engine.clip, "max_grad_norm", 0.05),
    "the clipping function": lambda engine, losses: set_clip(engine, Automatic(max_grad_norm=0.5, stabiliser=1.0)),
    "weights": lambda engine, losses: engine.model.layer.weight.data.mul_(2),
    "eval of a part": lambda engine, losses: engine.model.inner.eval(),
    "the optimizer's rate": lambda engine, losses: engine._patch.optimizer.param_groups[0].update(lr=0.01),
}


def test_what_changes_in_python_changes_the_compiled_step(monkeypatch):
    """One change after the other, in an eager and in a compiled training.

    A counter and a buffer that is bound anew in each step are beside them.
    """
    monkeypatch.setattr(clipping.program.graphs, "MOST", 3 * len(CHANGES))
    trainings = []
    for compile in (False, True):
        torch.manual_seed(3)
        engine, _ = make(Odd(), batch_size=6, sampling="shuffled")
        losses = [cross_entropy]
        step = engine.make_step(lambda outputs, targets, losses=losses: losses[-1](outputs, targets), compile=compile)
        trainings.append((engine, losses, step))
    x, y = torch.randn(6, 5), torch.randint(3, (6,))
    for name, change in CHANGES.items():
        ends, before = [], step.graphs.steps
        for engine, losses, step in trainings:
            engine.model.seen = torch.zeros(())
            engine.model.written.zero_()
            handle = change(engine, losses)
            for _ in range(9 if name == "nothing" else 5):
                step(x, y)
            getattr(handle, "remove", lambda: None)()  # of a hook, which may be one of all modules
            ends.append((weights(engine), engine.model.seen, engine.model.written, engine.model.count))
        torch.testing.assert_close(*ends, rtol=1e-5, atol=1e-6, msg=lambda said, name=name: f"after {name}: {said}")
        assert step.graphs.steps > before, name


def test_a_model_that_is_cast_between_steps_is_captured_anew():
    """Its gradients are slices of the engine's sums. After the cast, each has another dtype than its sum."""
    ends = []
    for compile in (False, True):
        torch.manual_seed(3)
        engine, _ = make(nn.Linear(5, 3), batch_size=6, sampling="shuffled")
        step, x, y = engine.make_step(cross_entropy, compile=compile), torch.randn(6, 5), torch.randint(3, (6,))
        for _ in range(2):
            for _ in range(4):
                step(x, y)
            engine.model.double()
            x = x.double()
        ends.append(weights(engine))
    assert len(step.graphs._graphs) == 2
    torch.testing.assert_close(*ends, rtol=1e-6, atol=1e-7)


def test_a_method_of_the_loss_that_is_replaced_is_the_one_that_runs(monkeypatch):
    class Criterion(nn.Module):
        def forward(self, outputs, targets):
            return cross_entropy(outputs, targets)

    engine, _ = make(nn.Linear(5, 3), batch_size=6, sampling="shuffled")
    step, x, y = engine.make_step(Criterion(), compile=True), torch.randn(6, 5), torch.randint(3, (6,))
    for _ in range(4):
        step(x, y)
    assert step.graphs.steps > 0
    monkeypatch.setattr(Criterion, "forward", lambda self, outputs, targets: cross_entropy(outputs, targets) * 0 + 7)
    assert step(x, y).tolist() == [7] * 6


def test_steps_of_several_losses_may_take_turns():
    engine, _ = make(nn.Linear(5, 3), batch_size=6, sampling="shuffled")
    x, y, z = torch.randn(6, 5), torch.randint(3, (6,)), torch.randn(6, 3)
    losses = (
        nn.CrossEntropyLoss(reduction="none"),
        lambda outputs, targets: nn.MSELoss(reduction="none")(outputs, z)[:, 0],
    )
    steps = [engine.make_step(loss, compile=True) for loss in losses]
    for _ in range(8):
        for step in steps:
            step(x, y)
    assert min(step.graphs.steps for step in steps) > 4


def test_a_backend_whose_step_is_no_graph():
    engine, _ = make(backend="microbatch")
    with pytest.raises(ValueError, match=r"^expected compile=False for microbatch"):
        engine.make_step(cross_entropy, compile=True)
    step = engine.make_step(cross_entropy)
    step(*(each[:8] for each in data().tensors))
    assert engine.steps == 1


def test_without_an_optimizer_or_in_eval_mode_it_is_refused():
    engine, optimizer, step, x, y = own_batches()
    for _ in range(4):
        step(x, y)
    engine.model.eval()
    with pytest.raises(Misuse, match="eval mode"):
        step(x, y)
    engine.model.train()
    step(x, y)
    engine.detach()
    with pytest.raises(Misuse, match=r"engine\.attach"):
        step(x, y)
    assert "step" not in vars(optimizer)


def test_after_an_interrupt_programs_go_on():
    engine, _, step, x, y = own_batches()
    for _ in range(4):
        step(x, y)

    def interrupt(module, inputs):
        raise KeyboardInterrupt

    handle = engine.model[0].register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        step(x, y)
    handle.remove()
    before = step.graphs.steps
    step(x, y)
    assert (engine.steps, step.graphs.steps) == (5, before + 1)


def test_a_forward_pass_between_is_no_part_of_a_step():
    """The model is recorded where the caller runs it, and not where a graph does."""
    engine, optimizer, step, x, y = own_batches()
    for _ in range(4):
        step(x, y)
        engine.model(x)
        step(x, y)
    optimizer.step(loss=cross_entropy(engine.model(x), y))
    assert engine.steps == 9
    assert engine._recorder._recording is None


def both(model_of, run, compile="auto", **changes):
    """The weights of an eager and a compiled training of the same steps, and the compiled step."""
    ends, x, y = [], torch.randn(6, 5).double(), torch.randint(3, (6,))
    for how in (False, compile):
        torch.manual_seed(3)
        random.seed(0)
        np.random.seed(0)
        engine, _ = make(model_of().double(), batch_size=6, sampling="shuffled", **changes)
        step = engine.make_step(cross_entropy, compile=how)
        run(engine, lambda step=step: step(x, y))
        ends.append(weights(engine))
        engine.detach()
    return ends, step


SCALES = {
    "random": lambda: 2 if random.random() < 0.5 else 1,
    "scaled": random.random,
    "shuffled": lambda: random.sample([1, 2, 3, 4], 4)[0],
    "numpy": lambda: torch.from_numpy(np.random.rand(1)),
    "asks": lambda: 2 if torch.compiler.is_compiling() else 1,
}
"""What no graph does as the caller's Python does it."""


class Dropping(nn.Module):
    """Scales its output by random numbers of Python's, or by a count that never ends."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.layer, self.how, self.count = nn.Linear(5, 3), how, 0

    def forward(self, x):
        if self.how in SCALES:
            return self.layer(x) * SCALES[self.how]()
        self.count += 1
        return self.layer(x) * (3 if self.count % 4 == 0 else 1)


@pytest.mark.parametrize("how", [*SCALES, "counted"])
def test_what_has_no_graph_or_too_many_runs_eagerly(how, monkeypatch):
    monkeypatch.setattr(clipping.program.graphs, "MOST", 3)
    often = lambda engine, step: [step() for _ in range(12)]  # noqa: E731
    with pytest.warns(RuntimeWarning, match="at most 3 graphs") if how == "counted" else nullcontext():
        ends, step = both(lambda: Dropping(how), often)
    assert "others" in step.graphs.ways
    torch.testing.assert_close(*ends, rtol=0, atol=1e-12)
    if how in SCALES:
        with pytest.raises(UnsupportedModel, match="its step is no graph, for it cannot be captured"):
            both(lambda: Dropping(how), often, compile=True)


def test_what_torch_does_not_compile_runs_once():
    """Else buffers and dropout would move twice in a step."""
    seen = []

    def run(engine, step):
        for _ in range(4):
            step()
        with torch.compiler.set_stance("eager_on_recompile"):
            engine.model[0].scale = 0.5
            for _ in range(3):
                step()
        seen.append(engine.model[0].seen)

    ends, step = both(lambda: nn.Sequential(Odd(), nn.Dropout(0.5)), run)
    assert "stance is eager" in step.graphs.ways["others"]
    torch.testing.assert_close((ends[0], seen[0]), (ends[1], seen[1]), rtol=1e-5, atol=1e-6)


def test_gradients_are_of_the_layers_that_ran():
    """Two layers of one shape, in an order that a list of Python's says."""

    def ordered():
        net = Net(lambda net, x: net.order[1](net.order[0](x).tanh())[:, :3], a=nn.Linear(5, 5), b=nn.Linear(5, 5))
        net.order = [net.a, net.b]
        return net

    def run(engine, step):
        for turn in range(10):
            if turn > 4:
                engine.model.order.reverse()
            step()

    ends, step = both(ordered, run, compile=True)
    assert step.graphs.steps > 4
    assert torch.equal(*ends)


class Scheduled:
    """A clipping function that is no value: its factors change, and its sensitivity does not."""

    per_layer, sensitivity, share = False, 0.5, 1.0

    def factors(self, norms):
        return (0.5 / norms).clamp(max=1.0) * self.share


class Fading(Flat):
    """The same, of a frozen dataclass whose `share` is the class's."""

    share = 1.0

    def factors(self, norms):
        return super().factors(norms) * self.share


@pytest.mark.parametrize("clip", [Scheduled(), Fading(max_grad_norm=0.5)])
def test_a_clipping_function_that_may_change_unseen_runs_eagerly(clip, monkeypatch):
    def run(engine, step):
        for turn in range(6):
            monkeypatch.setattr(type(clip), "share", 1 / (1 + turn))
            step()

    ends, step = both(Odd, run, clip=clip)
    assert f"{type(clip).__name__} is no frozen dataclass" in step.graphs.ways["others"]
    assert torch.equal(*ends)
    with pytest.raises(UnsupportedModel, match=r"no frozen dataclass.*compile=False"):
        both(Odd, run, compile=True, clip=clip)


def averaging(net, x):
    """Moves a teacher towards its student in each forward pass, and shrinks the student."""
    with torch.no_grad():
        net.student.weight.data.mul_(0.9)
        net.move(net.teacher.weight, net.student.weight)
    return net.student(x) + net.teacher(x)


MOVES = {
    "in place": lambda p, q: p.lerp_(q, 0.1),
    "in place, in data": lambda p, q: p.data.mul_(0.9).add_(q.data, alpha=0.1),
    "new data": lambda p, q: setattr(p, "data", p.data * 0.9 + q.data * 0.1),
}


@pytest.mark.parametrize("compile", [None, False, True])
@pytest.mark.parametrize("move", MOVES)
def test_parameters_that_the_forward_pass_writes_to_move_once_a_step(move, compile):
    model = Net(averaging, student=nn.Linear(5, 3), teacher=nn.Linear(5, 3).requires_grad_(False)).double()
    model.move = MOVES[move]
    engine, optimizer = make(model, batch_size=6, sampling="shuffled", noise_multiplier=0.0)
    x, y = torch.randn(6, 5).double(), torch.randint(3, (6,))
    step = None if compile is None else engine.make_step(cross_entropy, compile=compile)
    teacher, student = model.teacher.weight.clone(), model.student.weight.detach().clone()
    optimizer.register_step_pre_hook(lambda *_: moved.append(model.student.weight.detach().clone()))
    for number in range(8):
        moved, student = [], student * 0.9
        teacher = torch.lerp(teacher, student, 0.1)
        if compile and move == "new data" and number == 3:
            with pytest.raises(UnsupportedModel, match="not what the graph leaves"):
                step(x, y)
            return
        step(x, y) if step else optimizer.step(loss=cross_entropy(model(x), y))
        torch.testing.assert_close((model.teacher.weight, moved[0]), (teacher, student), rtol=0, atol=1e-12)
        student = model.student.weight.detach().clone()
    assert not compile or step.graphs.way == "traced"
