"""Loops in which a model is trained beside another one, frozen and thawed, or computes what differs by itself."""

import copy
import functools
import pickle
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from attached import attached, cross_entropy
from by_hand import clipped_sum
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.data import TensorDataset

from clipping import UnsupportedModel, load_backend
from dpbench import Misuse, PrivacyEngine
from dpbench.conformance.modules import Net

B = 6
each = pytest.mark.parametrize("backend", ["bk_mixed", "microbatch"])  # with a tape, and without


pytestmark = pytest.mark.filterwarnings("ignore")


def private(model, lr=0.0, **options):
    given = {"batch_size": B, "sample_size": 60, "steps": 400, "max_grad_norm": 0.5, "noise_multiplier": 0.0}
    _, optimizer, engine = attached(model, lr=lr, **given | options)
    return engine, optimizer


def require_sum(model, losses, clip=0.5, count=B, rtol=1e-8, atol=1e-10):
    """What is in `.grad` is the sum of clipped gradients of losses(model, i), one record at a time."""
    found, alone = {name: p.grad * B for name, p in model.named_parameters() if p.requires_grad}, copy.deepcopy(model)
    wanted = clipped_sum((losses(alone, i) for i in range(count)), {n: alone.get_parameter(n) for n in found}, clip)
    torch.testing.assert_close(found, wanted, rtol=rtol, atol=atol)


def networks():
    torch.manual_seed(0)
    generator, critic = nn.Linear(2, 4).double(), nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    return generator, critic, torch.randn(B, 4).double(), torch.randn(B, 2).double()


@each
def test_a_discriminator_that_is_frozen_while_the_generator_is_trained(backend):
    generator, critic, x, z = networks()
    engine, optimizer = private(critic, lr=1.0, backend=backend)
    other = torch.optim.SGD(generator.parameters(), lr=0.1)
    for _ in range(3):
        critic.requires_grad_(False)
        other.zero_grad()
        F.softplus(-critic(generator(z))).mean().backward()
        assert generator.weight.grad.any()
        other.step()
        critic.requires_grad_(True)
        fake, before = generator(z).detach(), copy.deepcopy(critic)
        optimizer.step(loss=(F.softplus(-critic(x)) + F.softplus(critic(fake)))[:, 0])
        for p, q in zip(before.parameters(), critic.parameters(), strict=True):
            p.grad = q.grad
        require_sum(before, lambda d, i, fake=fake: (F.softplus(-d(x[i])) + F.softplus(d(fake[i])))[0])
    assert engine.steps == 3


@each
def test_a_penalty_on_gradients_every_few_steps(backend):
    """WGAN-GP and lazy R1: a gradient within the loss. It is formed as by hand, or refused by name."""
    _, critic, x, _ = networks()
    _, optimizer = private(critic, backend=backend)

    def losses_of(d, x, step):
        x = x.clone().requires_grad_()
        out = d(x)[:, 0]
        if step % 2:
            return out
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return out + 10 * (slope.norm(dim=1) - 1) ** 2

    for step in range(1, 5):
        if step % 2 == 0 and backend != "microbatch":
            with pytest.raises(Misuse, match="a gradient within the losses takes backend='microbatch'"):
                losses_of(critic, x, step)
            continue
        optimizer.step(loss=losses_of(critic, x, step))
        require_sum(critic, lambda d, i, step=step: losses_of(d, x[i : i + 1], step)[0])


def test_a_gradient_by_what_is_made_of_a_parameter_is_refused_by_name():
    """A step for each sample on weights of its own, before the model answers (MAML)."""

    def adapts(net, x, y):
        own = net.weight.expand(len(x), 5, 3)
        (slope,) = torch.autograd.grad((x @ own - y).square().sum(), own, create_graph=True)
        return x @ (own - 0.1 * slope)

    model = Net(adapts, weight=torch.ones(5, 3))
    private(model)
    with pytest.raises(Misuse, match="a gradient within the losses takes backend='microbatch'"):
        model(torch.randn(B, 4, 5), torch.randn(B, 4, 3))


@each
def test_what_is_thawed_after_the_forward_pass_is_refused_and_before_it_is_trained(backend):
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3)).double(), torch.randn(B, 4).double()
    engine, optimizer = private(model, backend=backend)
    model[0].requires_grad_(False)
    losses = model(x).square().sum(1)
    model[0].requires_grad_(True)
    with pytest.raises(Misuse, match=r"'0.bias' frozen or unfrozen since: do so before the forward pass"):
        optimizer.step(loss=losses)
    assert engine.steps == 0
    model[0].requires_grad_(False)
    model(x)  # whose recording is of other parameters
    model[0].requires_grad_(True)
    optimizer.step(loss=model(x).square().sum(1))
    require_sum(model, lambda m, i: m(x[i]).square().sum())


@each
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_step_without_gradients_is_the_ordinary_one(mode, backend):
    """The losses keep their graph, in the step that is looked at and in later ones."""
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3)).double(), torch.randn(B, 4).double()
    _, optimizer = private(model, backend=backend)
    for _ in range(2):
        losses = model(x).square().sum(1)
        with mode():
            optimizer.step(loss=losses)
        require_sum(model, lambda m, i: m(x[i]).square().sum())


class Draws(nn.Module):
    """Drops by a generator of its own."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.own = nn.Linear(4, 8), nn.Linear(8, 3), torch.Generator().manual_seed(1)

    def forward(self, x):
        h = self.a(x).tanh()
        return self.b(h * (torch.rand(h.shape, generator=self.own) > 0.3))


class Counts(Draws):
    """Scales by the number of its calls, in Python."""

    calls = 0

    def forward(self, x):
        self.calls += 1
        return self.b(self.a(x).tanh()) * (1 + 0.1 * self.calls)


class Shows(Draws):
    """Keeps a number for its user, so that a check compares what batches of other sizes leave behind."""

    def forward(self, x):
        self.shown = x.mean()
        return super().forward(x)


class Anneals(Draws):
    """By a buffer that is changed in place, and that the backward pass reads."""

    def __init__(self):
        super().__init__()
        self.register_buffer("temperature", torch.tensor(2.0))

    def forward(self, x):
        self.temperature.mul_(0.9)
        return self.b(self.a(x).tanh()) / self.temperature


class Follows(Draws):
    """Beside a teacher, frozen parameters that each forward pass moves."""

    def __init__(self):
        super().__init__()
        self.teacher = nn.Linear(8, 3).requires_grad_(False)

    def forward(self, x):
        h = self.a(x).tanh()
        with torch.no_grad():
            for p, q in zip(self.teacher.parameters(), self.b.parameters(), strict=True):
                p.mul_(0.9).add_(q, alpha=0.1)
        return self.b(h) - self.teacher(h.detach())


@pytest.mark.parametrize("kind", [Draws, Counts, Shows, Anneals, Follows])
@pytest.mark.parametrize(("known", "backend"), [(False, "bk_mixed"), (True, "bk_mixed"), (False, "microbatch")])
def test_what_differs_by_itself_is_not_called_mixing(kind, known, backend):
    torch.manual_seed(0)
    model, x, y = kind(), torch.randn(B, 4), torch.randint(0, 3, (B,))
    engine, optimizer = private(model, noise_multiplier=1.0, backend=backend)
    step = engine.make_step(cross_entropy) if known else lambda x, y: optimizer.step(loss=cross_entropy(model(x), y))
    for _ in range(3):
        step(x, y)
    assert engine.steps == 3


@pytest.mark.parametrize("compiled", [None, False, True])
def test_a_teacher_and_a_temperature_move_once_a_step(compiled):
    torch.manual_seed(0)
    for kind, state in ((Anneals, "temperature"), (Follows, "teacher.weight")):
        model, x, y = kind(), torch.randn(B, 4), torch.randint(0, 3, (B,))
        alone = copy.deepcopy(model)
        engine, optimizer = private(model)  # with a learning rate of 0
        step = None if compiled is None else engine.make_step(cross_entropy, compile=compiled)
        for _ in range(5):
            optimizer.step(loss=cross_entropy(model(x), y)) if step is None else step(x, y)
            alone(x)
        torch.testing.assert_close(model.state_dict()[state], alone.state_dict()[state])


@each
@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("read", ["copied", "among the outputs", "of the model"])
def test_a_loss_may_read_parameters(read, known, backend):
    """In the caller's own loop if they are outputs copied for each sample. The loss also runs the model."""

    def forward(net, x):
        width = net.width.exp()
        return net.mean(x), width.repeat(len(x), 1) if read == "copied" else width

    def loss_of(model, outputs, x):
        losses = -sum(torch.distributions.Normal(*each).log_prob(x[:, :3]).sum(1) for each in (outputs, model(-x)))
        return losses * model.width[0].exp() + model.mean.weight.square().sum() if read == "of the model" else losses

    torch.manual_seed(0)
    model, x = Net(forward, mean=nn.Linear(4, 3), width=torch.zeros(3)).double(), torch.randn(B, 4).double()
    engine, optimizer = private(model, backend=backend)
    known_step = engine.make_step(lambda outputs, x: loss_of(model, outputs, x))
    step = known_step if known else lambda x, _: optimizer.step(loss=loss_of(model, model(x), x))
    if not (read == "copied" or known or backend == "microbatch"):
        with pytest.raises(
            UnsupportedModel, match=r"(width|weight): is read .* outside of the model's recorded forward pass.*expand"
        ):
            step(x, x)
        return
    for count in (B, B, B, B, 1):
        step(x[:count], x[:count])
        require_sum(model, lambda m, i: loss_of(m, m(x[i : i + 1]), x[i : i + 1])[0], count=count)


class Annealed(nn.Module):
    """Counts its calls: in a number, in a buffer, and in an attribute that gets a new tensor each time."""

    def __init__(self):
        super().__init__()
        self.calls, self.bound = 0, torch.zeros(())
        self.register_buffer("buffer", torch.zeros(()))

    def forward(self, outputs, targets):
        self.calls += 1
        self.buffer += 1
        self.bound = self.bound + 1
        return cross_entropy(outputs, targets) * (1 + 0.1 * self.calls)

    def counts(self):
        return {self.calls, int(self.buffer), int(self.bound)}


def in_closure():
    calls, box = 0, {"calls": [0]}

    def loss(outputs, targets):
        nonlocal calls
        calls += 1
        box["calls"][0] += 1
        return cross_entropy(outputs, targets) * (1 + 0.1 * calls)

    return loss, lambda: {calls, *box["calls"]}


COUNTED, SHARED = 0, Annealed()


def by_globals(outputs, targets):
    global COUNTED
    COUNTED += 1
    return SHARED(outputs, targets)


def of_a_trainer():
    trainer = SimpleNamespace(criterion=Annealed(), calls=0)

    def loss(outputs, targets):
        trainer.calls += 1
        return trainer.criterion(outputs, targets)

    return loss, lambda: {trainer.calls, *trainer.criterion.counts()}


def of_an_object(call):
    loss = Annealed()
    return call(loss), loss.counts


MOVING = {
    "a module": lambda: of_an_object(lambda loss: loss),
    "a method": lambda: of_an_object(lambda loss: loss.forward),
    "partial": lambda: of_an_object(lambda loss: functools.partial(lambda of, *given: of(*given), loss)),
    "a closure": in_closure,
    "globals": lambda: (by_globals, lambda: {COUNTED, *SHARED.counts()}),
    "a trainer": of_a_trainer,
}


@pytest.mark.parametrize("compiled", [False, "auto"])
@pytest.mark.parametrize("kind", MOVING)
def test_a_loss_moves_what_it_holds_once_a_step(kind, compiled, monkeypatch):
    """Beside looks, verification and programs, which all call it again."""
    for known in (True, False):
        monkeypatch.setitem(globals(), "COUNTED", 0)
        monkeypatch.setitem(globals(), "SHARED", Annealed())
        torch.manual_seed(0)
        model, x, y = nn.Linear(4, 3), torch.randn(B, 4), torch.randint(0, 3, (B,))
        loss, counts = MOVING[kind]()
        if known:
            step = private(model)[0].make_step(loss, compile=compiled)
        else:
            step = load_backend("bk_mixed")(model, loss, compile=compiled, timing=False)
        for _ in range(5):
            step(x, y)
        assert counts() == {5}


def tagger(net, x, lengths, ordered=False):
    """[B, T, 3], T the length of the longest record."""
    packed = pack_padded_sequence(net.words(x), lengths, batch_first=True, enforce_sorted=ordered)
    return net.out(pad_packed_sequence(net.layer(packed)[0], batch_first=True)[0])


def tagged(lengths):
    torch.manual_seed(0)
    n, words = len(lengths), nn.Embedding(20, 6)
    model = Net(tagger, words=words, layer=nn.GRU(6, 6, batch_first=True), out=nn.Linear(6, 3))
    return model, torch.randint(0, 20, (n, 9)), torch.tensor(lengths), torch.randint(0, 3, (n, 9))


def of_positions(outputs, targets):
    return F.cross_entropy(outputs.transpose(1, 2), targets[:, : outputs.shape[1]], reduction="none")


def test_a_mean_over_the_positions_of_the_longest_record_is_refused():
    model, x, lengths, y = tagged([3, 3, 9, 3, 3, 3])
    _, optimizer = private(model)
    with pytest.raises(UnsupportedModel, match="samples mix"):
        optimizer.step(loss=of_positions(model(x, lengths), y).mean(1))


@pytest.mark.parametrize(("lengths", "ordered"), [([3, 3, 9, 3, 3, 3], False), ([9, 7, 4, 4, 2, 1], True)])
def test_a_mean_over_a_records_own_positions_is_trained_and_a_sorted_batch_stays_so(lengths, ordered):
    model, x, lengths, y = tagged(lengths)
    engine, optimizer = private(model)
    losses = of_positions(model(x, lengths, ordered), y)
    mine = torch.arange(losses.shape[1]) < lengths[:, None]
    optimizer.step(loss=(losses * mine).sum(1) / lengths)
    assert engine.steps == 1


@pytest.mark.parametrize("centred", [False, True])
def test_outputs_with_time_first_are_looked_at_and_no_chance_refusal(centred):
    """[T, B, 3] and a state [layers, B, 8], where the number of layers happens to be a multiple of B."""

    def forward(net, x):
        out, (state, _) = net.layer(x.transpose(0, 1))
        found = net.out(out)
        return (found - found.detach().mean(1, keepdim=True) if centred else found), state

    torch.manual_seed(0)
    model, x = Net(forward, layer=nn.LSTM(4, 8, num_layers=2 * B), out=nn.Linear(8, 3)), torch.randn(B, 2 * B, 4)
    engine, optimizer = private(model)
    losses = model(x)[0].square().sum((0, 2))
    if centred:
        with pytest.raises(UnsupportedModel, match="samples mix"):
            optimizer.step(loss=losses)
    else:
        optimizer.step(loss=losses)
    assert engine.steps == (not centred)


@pytest.mark.parametrize("backend", ["bk_mixed", "fastgradclip"])
def test_a_gradient_that_is_scaled_later_is_seen_where_it_is_looked_at(backend, monkeypatch):
    """By a hook that scales a gradient by its norm over the batch, if that is large."""

    def forward(net, x):
        h = net.layer(x)
        if h.requires_grad:
            h.register_hook(lambda g: g * min(1.0, 4.0 / (float(g.norm()) + 1e-12)))
        return h.sum(1)

    monkeypatch.setattr("clipping.checks.sample_independence.RATE", 1.0)
    torch.manual_seed(0)
    model, x = Net(forward, layer=nn.Linear(4, 4, bias=False)), torch.randn(B, 4)
    engine, optimizer = private(model, backend=backend)
    optimizer.step(loss=model(x) * 0.01)
    with pytest.raises(UnsupportedModel, match="samples mix"):
        for _ in range(8):
            optimizer.step(loss=model(x) * 50)
    assert engine.steps >= 1


def test_a_gradient_that_is_bounded_for_each_record_is_exact():
    """By a hook that bounds each entry of a gradient: that of a weighted loss is not the loss's own, weighted."""

    def forward(net, x):
        h = net.layer(x)
        h.register_hook(lambda g: g.clamp(-0.1, 0.1))
        return h.square().sum(1)

    torch.manual_seed(0)
    model, x = Net(forward, layer=nn.Linear(4, 4, bias=False)).double(), torch.randn(B, 4).double()
    _, optimizer = private(model)
    for _ in range(2):
        optimizer.step(loss=model(x))
        require_sum(model, lambda m, i: m(x[i : i + 1]).sum())


class Equilibrium(nn.Module):
    """Solves for its gradient by backward passes within a hook, in each but its first step."""

    def __init__(self):
        super().__init__()
        self.inner, self.outer, self.solves, self.is_once = nn.Linear(4, 4), nn.Linear(4, 4), False, False

    def layer(self, z, x):
        return torch.tanh(self.inner(z) + self.outer(x))

    def forward(self, x):
        z = self.layer(torch.zeros_like(x), x)
        if self.solves and z.requires_grad:
            start = z.detach().requires_grad_()
            again = self.layer(start, x)

            def solve(g):
                if self.is_once:
                    handle.remove()
                return g + torch.autograd.grad(again, start, g, retain_graph=True)[0]

            handle = z.register_hook(solve)
        return z.square().sum(1)


@pytest.mark.parametrize("is_once", [False, True])
@pytest.mark.parametrize("backend", ["bk_mixed", "ghost", "microbatch"])
def test_a_backward_pass_within_a_hook_is_none_of_the_losses(backend, is_once):
    torch.manual_seed(0)
    model, x = Equilibrium().double(), torch.randn(B, 4).double()
    _, optimizer = private(model, backend=backend)
    model.is_once = is_once
    for model.solves in (False, True, True):
        optimizer.step(loss=model(x))
        require_sum(model, lambda m, i: m(x[i : i + 1]).sum())


class OfFirstPass(nn.Sequential):
    """Two hooks, of an activation and of a layer, double the first gradient after a forward pass."""

    def __init__(self):
        super().__init__(nn.Linear(4, 4), nn.Linear(4, 3))
        self[1].register_full_backward_hook(lambda layer, given, _: (doubled_at_first(layer.calls, given[0]),))

    def forward(self, x):
        hidden, calls, self[1].calls = self[0](x).tanh(), [], []
        if hidden.requires_grad:
            hidden.register_hook(lambda g: doubled_at_first(calls, g))
        return self[1](hidden.sin())


def doubled_at_first(calls, g):
    calls.append(None)
    return 2 * g if len(calls) == 1 else g


@pytest.mark.parametrize("backend", ["bk_mixed", "ghost", "microbatch"])
def test_each_pass_of_a_step_begins_with_what_hooks_held(backend):
    torch.manual_seed(0)
    model, x = OfFirstPass().double(), torch.randn(B, 4).double()
    _, optimizer = private(model, backend=backend)
    for _ in range(3):
        optimizer.step(loss=model(x).square().sum(1))
        assert len(model[1].calls) == 1
        require_sum(model, lambda m, i: m(x[i : i + 1]).square().sum())


COPIES = {"deepcopy": copy.deepcopy, "copy": copy.copy, "pickle": lambda both: pickle.loads(pickle.dumps(both))}


@pytest.mark.parametrize("how", COPIES)
def test_a_copy_draws_noise_and_batches_of_its_own(how):
    torch.manual_seed(0)
    model = nn.Linear(20, 30)
    engine = PrivacyEngine(model, batch_size=6, sample_size=60, steps=9, max_grad_norm=1.0, noise_multiplier=1.0)
    key = engine._sampler.key
    noise, sampler = map(COPIES[how], (engine.noise, engine._sampler))
    assert noise.state_dict()["key"] != engine.noise.state_dict()["key"] and sampler.key != key == engine._sampler.key
    assert key not in pickle.dumps(engine) and engine.noise.state_dict()["key"] not in pickle.dumps(engine)
    assert any(sampler.batch(i).tolist() != engine._sampler.batch(i).tolist() for i in range(9))


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_a_copy_of_an_attached_engine_may_be_attached(how):
    model, x = nn.Linear(4, 3), torch.randn(B, 4)
    engine, optimizer = private(model, lr=0.1)
    optimizer.step(loss=model(x).sum(1))
    copied, other, again = COPIES[how]((model, optimizer, engine))
    again.attach(other)
    other.step(loss=copied(x).sum(1))
    assert (engine.steps, again.steps) == (1, 2) and not torch.equal(model.weight, copied.weight)
    optimizer.step(loss=model(x).sum(1))
    torch.testing.assert_close(model.weight, copied.weight)


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_a_copy_in_the_middle_of_a_step_holds_the_sum_alone(how):
    model, x = nn.Linear(200, 100).double(), torch.randn(3, B, 200).double()
    engine, optimizer = private(model, noise_multiplier=1e-13)  # an array for C is made for the noise
    step = engine.make_step(cross_entropy, compile=True)
    for _ in range(4):
        step(x[0], torch.arange(B))
    losses = model(next(iter(engine.data_loader(TensorDataset(torch.randn(60, 200).double()))))[0]).sum(1)
    optimizer.step(loss=losses)
    optimizer.virtual_step(loss=model(x[0]).sum(1))
    losses = model(x[1]).sum(1)
    copied, again = COPIES[how]((model, engine))
    optimizer.step(loss=losses)
    again.attach(other := torch.optim.SGD(copied.parameters(), lr=0.0))
    other.step(loss=copied(x[2]).sum(1))
    assert engine.steps == again.steps == 6
    require_sum(model, lambda m, i: m(x.flatten(0, 1)[i]).sum(), count=2 * B)
    require_sum(copied, lambda m, i: m(x[[0, 2]].flatten(0, 1)[i]).sum(), count=2 * B)


@pytest.mark.parametrize("compiled", [False, True])
def test_a_context_of_autocast_may_span_several_steps(compiled):
    """It keeps the parameters' casts, which are those of the parameters before the step."""
    model, x, y = nn.Linear(4, 3), torch.randn(B, 4), torch.arange(B) % 3
    _, optimizer = private(model, lr=10.0)
    step = optimizer.privacy_engine.make_step(cross_entropy, compile=compiled)
    with torch.autocast("cpu", torch.bfloat16):
        for _ in range(5):
            before = copy.deepcopy(model)
            step(x, y)
    before.weight.grad, before.bias.grad = model.weight.grad, model.bias.grad
    alone = before.to(torch.bfloat16).float()
    for p, q in zip(alone.parameters(), model.parameters(), strict=True):
        p.grad = q.grad
    require_sum(alone, lambda m, i: cross_entropy(m(x[i : i + 1]), y[i : i + 1])[0], rtol=0.02, atol=0.02)


def test_a_copy_of_a_step_captures_the_copied_model():
    model, x, y = nn.Linear(4, 3), torch.randn(B, 4), torch.arange(B) % 3
    engine, optimizer = private(model, lr=0.1)
    step = engine.make_step(cross_entropy, compile=True)
    for _ in range(4):
        step(x, y)
    copied, other, again = copy.deepcopy((model, optimizer, step))
    again._engine.attach(other)
    for _ in range(4):
        step(x, y)
        again(x, y)
    assert step.graphs.way == again.graphs.way == "traced"
    torch.testing.assert_close(model.weight, copied.weight, rtol=0, atol=0)


def test_an_optimizer_may_hold_what_is_frozen():
    torch.manual_seed(0)
    body, head, x = nn.Linear(4, 8), nn.Linear(8, 3), torch.randn(B, 4)
    body.requires_grad_(False)
    optimizer = torch.optim.SGD([*body.parameters(), *head.parameters()], lr=0.1)
    engine = PrivacyEngine(head, batch_size=B, sample_size=60, steps=9, max_grad_norm=1.0, noise_multiplier=1.0)
    engine.attach(optimizer)
    optimizer.step(loss=head(body(x)).square().sum(1))
    body.requires_grad_(True)
    with pytest.raises(Misuse, match="got 2 of others"):
        optimizer.step(loss=head(body(x).detach()).square().sum(1))
    assert engine.steps == 1
