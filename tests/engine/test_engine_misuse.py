"""What goes wrong in the hands of a user gets one line: what was expected, what came, what to do."""

import copy
import gc
import warnings
import weakref

import numpy as np
import pytest
import torch
from attached import attached, batch, cross_entropy, says
from torch import nn
from torch.func import functional_call, grad, vmap

from accounting import NoAnswer
from clipping import Flat, UnsupportedModel, WrongGradient, load_backend
from dpbench import Misuse, PrivacyWarning


def made(model=None, **changes):
    return attached(model, **{"batch_size": 16, "sample_size": 1000, "max_grad_norm": 0.5} | changes)


def engine_of(model, **changes):
    return made(model, attach=False, **changes)[2]


@pytest.fixture
def loop():
    model, optimizer, engine = made()
    yield model, optimizer, engine
    engine.detach()


def losses_of(model, count=6):
    return cross_entropy(model(torch.randn(count, 5)), torch.zeros(count, dtype=torch.long))


@pytest.mark.parametrize("backend", ["bk_mixed", "ghost", "microbatch"])
def test_backward_by_hand(backend):
    model, optimizer, engine = made(backend=backend)
    losses = losses_of(model)
    with says(Misuse, r"expected no backward\(\): optimizer.step\(loss=losses\) runs it"):
        losses.mean().backward()
        optimizer.step(loss=losses)
    optimizer.zero_grad()
    optimizer.step(loss=losses_of(model))  # and training can go on
    assert engine.steps == 1


OTHERS = r"expected one loss a sample, shape \[6\].*samples must come first, and none may be left out"
#: What is made of six losses and given to a step -> what is said.
GIVEN = [
    (lambda x: {}, r"expected optimizer.step\(loss=losses\) with per-sample losses, got no loss"),
    (lambda x: {"closure": lambda: None}, "got a closure"),
    (lambda x: {"closure": x}, "got a closure"),  # the first argument by position
    (lambda x: {"loss": 0.3}, r"a tensor \[B\], got float"),
    (lambda x: {"loss": x.mean()}, r"shape \[6\], got a scalar: use reduction='none'"),
    (lambda x: {"loss": x.detach()}, "detached, or of no_grad, or of a pass that read no trainable parameter"),
    (lambda x: {"loss": x[:4]}, OTHERS),
    (lambda x: {"loss": x[:, None]}, OTHERS),
    (lambda x: {"loss": x.repeat(2)}, OTHERS),
]


@pytest.mark.parametrize(("given", "said"), GIVEN)
def test_what_are_no_losses_of_the_batch(loop, given, said):
    model, optimizer, engine = loop
    with says(Misuse, said):
        optimizer.step(**given(losses_of(model)))
    assert engine.steps == 0


def test_losses_without_a_forward_pass(loop):
    model, optimizer, _ = loop
    losses = losses_of(model)
    optimizer.step(loss=losses)
    with says(Misuse, "none was run since the last step"):
        optimizer.step(loss=losses)
    model.eval()
    losses = losses_of(model)
    with says(Misuse, "the model was in eval mode"):
        optimizer.step(loss=losses)


def test_losses_of_an_earlier_forward_pass(loop):
    model, optimizer, _ = loop
    losses = losses_of(model, 6)
    losses_of(model, 4)
    with says(Misuse, r"shape \[4\]"):
        optimizer.step(loss=losses)
    losses = losses_of(model, 6)
    losses_of(model, 4)
    losses_of(model, 6)
    with says(Misuse, "got some of an earlier one, of another batch"):
        optimizer.step(loss=losses)
    model.eval()
    losses = losses_of(model, 6)
    model.train()
    losses_of(model, 6)
    with says(UnsupportedModel, "is read where the tape does not see it: outside of the model's recorded forward pass"):
        optimizer.step(loss=losses)


def test_a_record_in_two_parts_of_a_logical_batch_is_refused(loop):
    model, optimizer, engine = loop
    (x, y), (other, _) = batch(6, seed=1), batch(6, seed=2)
    optimizer.virtual_step(loss=cross_entropy(model(x), y))
    optimizer.virtual_step(loss=cross_entropy(model(other), y))
    for part in (optimizer.virtual_step, optimizer.step):
        with says(Misuse, "expected other records in each part.*add the losses of all heads"):
            part(loss=model(x).square().sum(1))
    with says(Misuse, "got the tensors of an earlier part"):
        optimizer.virtual_step(loss=model(x.clone()).square().sum(1))  # as of a second x.to(device)
    x.add_(1)  # a buffer of the caller's, for the next batch
    optimizer.step(loss=cross_entropy(model(x), y))
    optimizer.virtual_step(loss=cross_entropy(model(x), y))
    for _ in range(2):  # different records may have the same codes
        optimizer.virtual_step(loss=cross_entropy(model(torch.ones(6, 5)), y))
    assert engine.steps == 1


def test_a_parameter_in_the_loss(loop):
    model, optimizer, engine = loop
    optimizer.step(loss=losses_of(model))
    with says(UnsupportedModel, r"2.weight: is read where the tape does not see it: outside of the model"):
        optimizer.step(loss=losses_of(model) + model[2].weight.square().sum())
    assert engine.steps == 1


def test_a_gradient_beside_the_losses_would_be_lost_and_is_refused(loop):
    """As by the backward() of a penalty. Zeros, and the gradients of the last step, are no loss."""
    model, optimizer, engine = loop
    said = r"expected no gradient in \.grad before a step on losses, got one at parameter '0.weight', .*step_pre_hook"
    for to_none in (True, False):
        optimizer.step(loss=losses_of(model))
        optimizer.step(loss=losses_of(model))
        optimizer.zero_grad(set_to_none=to_none)
        optimizer.step(loss=losses_of(model))
        for cleared in (True, False):
            if cleared:
                optimizer.zero_grad(set_to_none=to_none)
            sum(p.square().sum() for p in model.parameters()).backward()
            for step in (lambda: optimizer.step(loss=losses_of(model)), engine.empty_step):
                with says(Misuse, said):
                    step()
        optimizer.zero_grad(set_to_none=to_none)
    assert engine.steps == 6
    seen = []
    optimizer.register_step_pre_hook(lambda *_: seen.append(model[0].weight.grad.clone()))
    optimizer.step(loss=losses_of(model))
    assert torch.equal(seen[0], model[0].weight.grad) and seen[0].any()


def test_gradients_from_before_the_engine_are_no_loss():
    model, optimizer, engine = made(attach=False)
    losses_of(model).mean().backward()
    engine.attach(optimizer)
    optimizer.step(loss=losses_of(model))
    assert engine.steps == 1


def test_many_forward_passes_without_a_step(loop):
    model, _, _ = loop
    with pytest.warns(PrivacyWarning, match="16 forward passes in training mode without a step"):
        for _ in range(16):
            model(torch.randn(2, 5))


def test_batch_norm():
    model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 4), nn.BatchNorm1d(4))
    with says(UnsupportedModel, "1 and 1 more: BatchNorm mixes the samples.*GroupNorm"):
        engine_of(model)
    model.eval()
    engine = engine_of(model)  # frozen
    engine.attach(torch.optim.SGD(model.parameters(), lr=0.1))
    model.train()
    with says(UnsupportedModel, "1 and 1 more: BatchNorm mixes the samples"):
        model(torch.randn(6, 5))


def test_a_delta_that_protects_nobody():
    with pytest.warns(PrivacyWarning, match=r"target_delta=0.001 is not below 1/sample_size=0.001"):
        engine_of(nn.Linear(2, 2), target_delta=1e-3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert engine_of(nn.Linear(2, 2)).privacy_spent().delta == 1 / 2000


def test_two_engines_on_one_model(loop):
    model, optimizer, engine = loop
    other = torch.optim.SGD(model.parameters(), lr=0.1)
    with says(Misuse, "expected one engine on a model, got a second one on '0.weight'"):
        engine_of(model).attach(other)
    with says(Misuse, "expected an optimizer without an engine"):
        engine_of(model).attach(optimizer)
    with says(Misuse, "expected an engine that is not attached"):
        engine.attach(other)
    engine.detach()
    engine_of(model).attach(optimizer)


@pytest.mark.parametrize("backend", ["bk_mixed", "microbatch"])
def test_an_engine_that_was_dropped_is_not_forgotten(backend):
    """It goes with its model, or by detach()."""
    model = nn.Linear(5, 3)
    engine = engine_of(model, backend=backend)
    engine.attach(torch.optim.SGD(model.parameters(), lr=0.1))
    engine = weakref.ref(engine)
    gc.collect()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with says(Misuse, "expected one engine on a model"):
        engine_of(model).attach(optimizer)
    with says(Misuse, "goes round the privacy engine"):
        optimizer.step()
    del model, optimizer
    gc.collect()
    assert engine() is None


@pytest.mark.parametrize("backend", ["bk_mixed", "microbatch"])
def test_tensors_in_place_of_parameters(backend):
    """Their gradients are not those of the parameters that they are made of."""
    model, optimizer, engine = made(backend=backend)
    x, y = torch.randn(6, 5), torch.zeros(6, dtype=torch.long)
    own = dict(model.named_parameters())
    optimizer.step(loss=cross_entropy(functional_call(model, own, (x,)), y))
    for change in (lambda p: 3 * p, lambda p: p.detach().clone().requires_grad_()):
        losses = cross_entropy(functional_call(model, {name: change(p) for name, p in own.items()}, (x,)), y)
        with says(Misuse, "expected a forward pass of the model's own parameters, got another tensor for '0.weight'"):
            optimizer.step(loss=losses)
    assert engine.steps == 1


@pytest.mark.parametrize("backend", ["bk_mixed", "microbatch"])
@pytest.mark.parametrize("transform", [grad, vmap])
def test_a_transform_around_the_model(transform, backend):
    model, optimizer, engine = made(backend=backend)
    x, y = torch.randn(6, 5), torch.zeros(6, dtype=torch.long)
    with says(Misuse, r"expected a model outside of torch\.func\.grad.* or eval mode"):
        transform(lambda z: model(z).sum())(x)
    model.eval()
    slopes = transform(lambda z: model(z).sum())(x).detach()
    model.train()
    optimizer.step(loss=cross_entropy(model(x + 0.1 * slopes.view(6, -1).sign()), y))
    assert engine.steps == 1


def test_step_without_attach():
    model = nn.Linear(5, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = engine_of(model)
    with says(Misuse, r"expected engine.attach\(optimizer\) before optimizer.step\(loss=losses\)"):
        optimizer.step(loss=losses_of(model))
    with says(Misuse, r"expected engine.attach\(optimizer\) before a step"):
        engine.step(losses_of(model))


def test_another_optimizer_does_not_go_round_the_engine(loop):
    model, _, engine = loop
    other = torch.optim.Adam(model[2].parameters(), lr=0.1)
    with says(Misuse, "got one that goes round the privacy engine"):
        other.step()
    bystander = nn.Linear(2, 2)
    torch.optim.Adam(bystander.parameters()).step()
    engine.detach()
    other.step()


def test_two_engines_on_parts_of_a_model():
    for backend in ("microbatch", "bk_mixed"):
        body, head = nn.Linear(5, 4), nn.Linear(4, 3)
        (_, optimizer, engine), (_, other, of_head) = (made(part, backend=backend, lr=0.1) for part in (body, head))
        losses = losses_of(nn.Sequential(body, head))
        if backend == "microbatch":
            optimizer.step(loss=losses)
            with says(
                Misuse, "if another engine's step took these losses, make one engine of a module that holds both"
            ):
                other.step(loss=losses)
            continue
        with says(Misuse, "got some that pass through another one's, Linear, too: make one engine of a module"):
            optimizer.step(loss=losses)
        head.requires_grad_(False)
        optimizer.step(loss=losses_of(nn.Sequential(body, head)))
        assert (engine.steps, of_head.steps) == (1, 0)


class Both(torch.optim.Optimizer):
    """Steps two optimizers."""

    def __init__(self, *optimizers):
        self.optimizers = optimizers
        super().__init__([group for each in optimizers for group in each.param_groups], {})

    def step(self, closure=None):
        for each in self.optimizers:
            each.step()


def test_an_optimizer_may_step_those_that_it_is_made_of():
    model, whole, _ = made(attach=False)
    model_too = copy.deepcopy(model)
    parts = [torch.optim.SGD(model_too[i].parameters(), **whole.defaults) for i in (0, 2)]
    for each, optimizer in ((model, whole), (model_too, Both(*parts))):
        engine = engine_of(each, noise_multiplier=0.0)
        engine.attach(optimizer)
        torch.manual_seed(1)
        optimizer.step(loss=losses_of(each))
    with says(Misuse, "goes round the privacy engine"):
        parts[0].step()
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), model_too.parameters(), strict=True))


def test_parameters_of_optimizer_and_model(loop):
    model = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3))
    with says(Misuse, r"'0.weight' is not among its: freeze it .* attach one whose step\(\) runs both"):
        engine_of(model).attach(torch.optim.SGD(model[1].parameters(), lr=0.1))
    with says(Misuse, "expected one torch.optim.Optimizer of the model's parameters, got list"):
        engine_of(model).attach([torch.optim.SGD(part.parameters(), lr=0.1) for part in model])
    with says(Misuse, "expected an optimizer of the model's parameters alone, got 2 of others"):
        engine_of(model[1]).attach(torch.optim.SGD(model.parameters(), lr=0.1))
    model[0].requires_grad_(False)
    frozen = model[0].weight.clone()
    optimizer = torch.optim.SGD(model[1].parameters(), lr=0.1)
    engine_of(model).attach(optimizer)
    optimizer.step(loss=losses_of(model))
    assert torch.equal(frozen, model[0].weight)
    model[0].requires_grad_(True)
    with says(Misuse, r"'0.weight' is not among its: freeze it"):
        optimizer.step(loss=losses_of(model))


def test_arguments():
    for changes, message in [
        ({"noise_multiplier": None}, "expected one of target_epsilon and noise_multiplier, got neither"),
        ({"target_epsilon": 1.0}, "expected one of target_epsilon and noise_multiplier, got both"),
        ({"noise_multiplier": None, "target_epsilon": 1.0}, "expected epochs or steps beside target_epsilon"),
        ({"epochs": 1, "steps": 3}, "expected epochs or steps, not both"),
        ({"batch_size": 2000}, "expected batch_size <= sample_size, got 2000 > 1000"),
        ({"batch_size": 0}, "expected batch_size to be a whole number >= 1, got 0"),
        ({"sampling": "poison"}, "did you mean 'poisson'"),
        ({"clip": "flatt"}, "did you mean 'flat'"),
        ({"clip": Flat(2.0)}, "expected max_grad_norm to be the sensitivity"),
        ({"accountant": "prw"}, "prv"),
        ({"backend": "gost"}, "did you mean 'ghost'"),
        ({"backend": "nonprivate"}, "expected a backend that works from losses, one of microbatch, fastgradclip"),
        ({"backend": "opacus_ghost"}, "expected a backend that works from losses"),
        ({"backend": "ghost", "mixed": True}, "not both"),
        ({"max_grad_norm": float("inf")}, "expected a finite max_grad_norm with noise"),
        ({"secure": True, "generator": torch.Generator()}, "what is seeded is not secure"),
        ({"target_delta": 2.0}, r"expected target_delta in \[0, 1\]"),
        ({"sampling": "truncated_poisson"}, "expected max_batch_size"),
        ({"max_grad_norm": 0}, "expected max_grad_norm > 0, got 0"),
        ({"batch_size": True}, "expected batch_size to be a whole number >= 1, got True"),
        ({"epochs": True}, "expected epochs to be a number, got True"),
        ({"target_delta": float("nan")}, "expected target_delta to be a number, got nan"),
    ]:
        with says(ValueError, message):
            engine_of(nn.Linear(2, 2), **changes)
    numbers = {"batch_size": np.int64(16), "noise_multiplier": np.float32(1.5), "epochs": np.float64(2)}
    state = engine_of(nn.Linear(2, 2), **numbers).settings.as_state()
    assert (state["batch_size"], state["noise_multiplier"], type(state["noise_multiplier"])) == (16, 1.5, float)


def test_fixed_batches_are_not_taken_for_poisson_samples(loop):
    model, optimizer, engine = loop
    with pytest.warns(PrivacyWarning, match="of .* batches had exactly 16 samples: not Poisson"):
        for _ in range(16):
            optimizer.step(loss=losses_of(model, 16))
    spent = engine.privacy_spent()
    assert spent.sampled_by == "assumed" and not spent.private
    assert "these are not Poisson samples" in spent.caveats[0] and "Poisson sampling assumed" in str(spent)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"sampling": "shuffled", "accountant": "gdp"}, "no valid bound by this accountant under one pass an epoch"),
        ({"group_size": 3, "accountant": "rdp"}, "no bound for a group of records by this accountant; prv and pld"),
        ({"group_size": 3, "sampling": "balls_and_bins"}, "no bound for a group of records but under Poisson"),
    ],
    ids=str,
)
def test_an_accountant_without_a_bound_is_refused_before_training(changes, said):
    with says(NoAnswer, said):
        engine_of(nn.Linear(2, 2), **changes)


def test_beyond_the_planned_steps():
    model, optimizer, engine = made(noise_multiplier=None, target_epsilon=2.0, steps=2)
    for _ in range(2):
        optimizer.step(loss=losses_of(model))
    assert 1.9 < engine.privacy_spent().epsilon <= 2
    with pytest.warns(PrivacyWarning, match="step 3 is beyond the 2"):
        optimizer.step(loss=losses_of(model))
    assert engine.privacy_spent().epsilon > 2


def test_seeded_noise_is_not_private():
    engine = engine_of(nn.Linear(2, 2), generator=torch.Generator().manual_seed(0))
    spent = engine.privacy_spent()
    assert not spent.private and "NOT PRIVATE: the noise is seeded" in str(spent)
    assert engine_of(nn.Linear(2, 2)).privacy_spent().private
    assert not engine_of(nn.Linear(2, 2), noise_multiplier=0.0).privacy_spent().private


def test_a_model_without_numbers_or_without_python_is_refused():
    with torch.device("meta"):
        nowhere = nn.Linear(3, 2)
    with says(UnsupportedModel, r"is on the meta device .remedy: model.to_empty"):
        engine_of(nowhere)
    with says(UnsupportedModel, "has lazy layers without parameters .remedy: run it once"):
        engine_of(nn.Sequential(nn.LazyLinear(2)))
    with says(UnsupportedModel, r"is TorchScript, whose operations cannot be recorded"):
        engine_of(torch.jit.trace(nn.Linear(3, 2), torch.zeros(2, 3)))


def test_an_embedding_that_scales_the_rows_of_a_batch_is_refused():
    for kind in (nn.Embedding, nn.EmbeddingBag):
        with says(UnsupportedModel, r"0: scales the rows of its batch's words in the forward pass \(max_norm\)"):
            engine_of(nn.Sequential(kind(5, 3, max_norm=1.0), nn.Linear(3, 3)), backend="microbatch")


def test_batches_that_are_kept_and_used_again_are_refused_or_told():
    model, optimizer, engine = made(nn.Linear(3, 1), batch_size=4, sample_size=400)
    data = torch.utils.data.TensorDataset(torch.randn(400, 3))
    kept = list(engine.data_loader(data))
    for (x,) in kept:
        optimizer.step(loss=model(x)[:, 0])
    with pytest.warns(PrivacyWarning, match="one that is none of its last 64: how it was drawn is assumed"):
        optimizer.step(loss=model(kept[0][0])[:, 0])
    with says(Misuse, "got one that is done with"):
        optimizer.step(loss=model(kept[-1][0])[:, 0])


@pytest.mark.parametrize("compiled", [None, False, True])
def test_a_hook_of_a_parameter_that_comes_later_is_verified_anew_or_refused(compiled):
    """In a program, too, which runs no hook of a parameter; an optimizer in the backward pass would never step."""
    model, optimizer, engine = made(sampling="shuffled")
    x, y = torch.randn(6, 5), torch.zeros(6, dtype=torch.long)
    whole = None if compiled is None else engine.make_step(cross_entropy, compile=compiled)
    step = whole or (lambda x, y: optimizer.step(loss=cross_entropy(model(x), y)))
    for _ in range(4):
        step(x, y)
    assert not compiled or whole.graphs.steps > 0
    handle = model[0].weight.register_post_accumulate_grad_hook(lambda p: None)
    with says(Misuse, "no register_post_accumulate_grad_hook on '0.weight'"):
        step(x, y)
    handle.remove()
    model[0].weight.register_hook(lambda g: 0 * g)
    with says(WrongGradient, "0.weight"):
        step(x, y)


def test_a_hook_that_comes_later_is_verified_anew_by_a_backend():
    model, x, y = nn.Linear(5, 3), torch.randn(6, 5), torch.zeros(6, dtype=torch.long)
    with load_backend("bk_mixed")(model, cross_entropy) as backend:
        backend(x, y)
        model.weight.register_hook(torch.zeros_like)
        with says(
            WrongGradient, r"'weight', expected .*; hooks on parameters .1 of .* may change gradients: remove them"
        ):
            backend(x, y)
