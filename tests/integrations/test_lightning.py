"""Lightning's Trainer, private: each of its steps is the engine's, and the weights are those of DP-SGD by hand."""

import csv
import random
import re
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset, WeightedRandomSampler

pytest.importorskip("lightning", reason="lightning is not installed")
from by_hand import by_hand, clipped_sum
from lightning.fabric import Fabric
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    Callback,
    GradientAccumulationScheduler,
    LambdaCallback,
    LearningRateFinder,
    ModelCheckpoint,
)
from lightning.pytorch.loggers import CSVLogger

from clipping import UnsupportedModel
from dpbench import Misuse, PrivacyEngine
from dpbench.engine import PrivacyWarning
from dpbench.integrations.lightning import PrivateModelParallelStrategy, PrivateStrategy

CLIP, LR = 0.3, 0.5
QUIET = {"enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu", "logger": False}


@pytest.fixture(autouse=True)
def quiet():
    warnings.filterwarnings("ignore")


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def data():
    numbers = torch.Generator().manual_seed(1)
    return TensorDataset(
        torch.randn(60, 6, generator=numbers, dtype=torch.float64), torch.randint(0, 3, (60,), generator=numbers)
    )


class Classifier(LightningModule):
    """As people write them, but for `reduction`."""

    reduction, momentum = "none", 0.0

    def __init__(self):
        super().__init__()
        self.net, self.seen = net(), []

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        self.seen.append((batch_idx, len(x)))
        return F.cross_entropy(self.net(x), y, reduction=self.reduction)

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val_loss", F.cross_entropy(self(x), y))

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=LR, momentum=self.momentum)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=7, gamma=0.1)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def strategy_of(seed=3, cls=PrivateStrategy, options=None, **privacy):
    known = {"batch_size": 12, "max_grad_norm": CLIP, "noise_multiplier": 0.0}
    if seed is not None:
        known["generator"] = torch.Generator().manual_seed(seed)
    return cls(privacy={**known, **privacy}, **(options or {}))


def fit(strategy, module=None, *, loader=None, ckpt_path=None, validate=False, **options):
    module = Classifier() if module is None else module
    keeps = any(isinstance(callback, ModelCheckpoint) for callback in options.get("callbacks", ()))
    known = {"max_epochs": 2, "enable_checkpointing": keeps}
    trainer = Trainer(strategy=strategy, **{**QUIET, **known, **options})
    loader = DataLoader(data(), batch_size=4, shuffle=True) if loader is None else loader
    trainer.fit(module, loader, DataLoader(data(), batch_size=20) if validate else None, ckpt_path=ckpt_path)
    return trainer, module


def wanted_of(strategy):
    """The weights of a loop by hand."""
    (x, y), engine = data().tensors, strategy.engine

    def loss_of(model, i):
        return F.cross_entropy(model(x[i : i + 1]), y[i : i + 1])

    run = {"steps": engine.steps, "clip": CLIP, "lr": lambda step: LR * 0.1 ** (step // 7)}
    return list(by_hand(net(), loss_of, engine.settings, engine._sampler.key, **run).values())


def assert_same(module, wanted, atol=1e-12):
    for p, q in zip(module.parameters(), wanted, strict=True):
        torch.testing.assert_close(p.detach(), q.detach(), rtol=0, atol=atol)


@pytest.mark.parametrize(("expected", "piece", "workers"), [(12, 1, 0), (12, 64, 0), (12, 4, 1), (1, 4, 0)])
def test_weights_are_those_of_a_loop_by_hand(expected, piece, workers):
    """Also of batches without records."""
    strategy = strategy_of(batch_size=expected, options={"model": "net"} if workers else None)
    loader = DataLoader(data(), batch_size=piece, shuffle=True, num_workers=workers)
    trainer, module = fit(strategy, loader=loader, max_steps=10)
    steps = strategy.engine.steps
    assert trainer.global_step == steps == 10
    wanted = wanted_of(strategy)
    assert max(float((p - q).detach().abs().max()) for p, q in zip(wanted, net().parameters(), strict=True)) > 1e-2
    assert_same(module, wanted)
    assert max(size for _, size in module.seen) <= piece
    sizes = [len(strategy.engine._sampler.batch(step)) for step in range(steps)]
    assert sum(size for _, size in module.seen) == sum(sizes) and (0 in sizes) == (expected == 1)


class Boxed(Classifier):
    def training_step(self, batch, batch_idx):
        x, boxes = batch
        return torch.stack(
            [(out - box).square().sum() + out.sum() for out, box in zip(self.net(x), boxes, strict=True)]
        )


def test_a_record_whose_own_tensor_is_empty_is_a_record():
    """A record without boxes is the only one of its batch, or beside others."""
    records = [(torch.ones(6).double(), torch.ones(k, 3).double()) for k in (0, 2, 1)]
    for piece in (1, 3):
        loader = DataLoader(
            records,
            batch_size=piece,
            collate_fn=lambda rows: (torch.stack([x for x, _ in rows]), [box for _, box in rows]),
        )
        _, module = fit(strategy_of(batch_size=3), Boxed(), loader=loader, max_epochs=1)
        model = net()
        losses = ((model(x) - box).square().sum() + model(x).sum() for x, box in records)
        total = clipped_sum(losses, dict(model.named_parameters()), CLIP)
        assert_same(module, [p - LR * total[name] / 3 for name, p in model.named_parameters()])


def test_epsilon_is_that_of_the_engine_alone_and_in_the_log(tmp_path):
    class Watch(Callback):
        rows, moved = 0, True

        def on_before_optimizer_step(self, trainer, pl_module, optimizer):
            self.before = [p.detach().clone() for p in pl_module.parameters()]

        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            self.rows += 1
            self.moved &= all(not torch.equal(p, q) for p, q in zip(self.before, pl_module.parameters(), strict=True))
            assert 0 < float(outputs["loss"]) < 10

    strategy, watch = strategy_of(None, noise_multiplier=None, target_epsilon=3.0), Watch()
    logs = {"logger": CSVLogger(tmp_path), "log_every_n_steps": 5, "default_root_dir": tmp_path}
    trainer, module = fit(strategy, callbacks=[watch], validate=True, **logs)
    assert watch.rows == trainer.global_step == 10 and watch.moved
    engine = PrivacyEngine(net(), batch_size=12, sample_size=60, epochs=2, max_grad_norm=CLIP, target_epsilon=3.0)
    assert strategy.engine.noise_multiplier == engine.noise_multiplier
    optimizer = torch.optim.SGD(engine.model.parameters(), lr=LR)
    engine.attach(optimizer)
    expected = {}
    while engine.steps < 10:
        for x, y in engine.data_loader(data()):
            optimizer.step(loss=F.cross_entropy(engine.model(x), y, reduction="none"))
            expected[engine.steps - 1] = engine.privacy_spent().epsilon
    engine.detach()
    assert strategy.engine.privacy_spent() == engine.privacy_spent()
    with open(next(tmp_path.rglob("metrics.csv"))) as file:
        logged = {int(row["step"]): float(row["epsilon"]) for row in csv.DictReader(file) if row["epsilon"]}
    assert logged == pytest.approx({step: expected[step] for step in (4, 9)})
    module(torch.randn(2, 6, dtype=torch.float64)).sum().backward()  # an ordinary module again


class Logs(Classifier):
    def training_step(self, batch, batch_idx):
        losses = super().training_step(batch, batch_idx)
        self.log("train_loss", losses.mean(), on_step=True, on_epoch=True)
        self.seen[-1] = (float(losses.detach().sum()), len(losses))
        return losses

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.log("ended", float(batch_idx), on_epoch=True, on_step=False)


def test_the_mean_of_an_epoch_is_over_the_records_of_its_pieces():
    trainer, module = fit(strategy_of(batch_size=2), Logs(), max_epochs=1)
    sums, counts = map(sum, zip(*module.seen, strict=True))
    assert float(trainer.callback_metrics["train_loss_epoch"]) == pytest.approx(sums / counts, rel=1e-6)
    assert 0 < float(trainer.callback_metrics["ended"]) < 30


def test_a_loop_of_fabric_has_its_precision():
    ends, (x, y) = [], data().tensors
    for precision in (Fabric(accelerator="cpu", precision="bf16-mixed").autocast(), torch.autocast("cpu")):
        model, generator = net().float(), torch.Generator().manual_seed(3)
        settings = {"batch_size": 12, "sample_size": 60, "max_grad_norm": CLIP, "noise_multiplier": 1.0}
        engine = PrivacyEngine(model, **settings, generator=generator)
        optimizer = torch.optim.SGD(model.parameters(), LR)
        engine.attach(optimizer)
        for x_, y_ in engine.data_loader(TensorDataset(x.float(), y), max_physical_batch_size=4):
            with precision:
                outputs = model(x_)
                assert outputs.dtype == torch.bfloat16
                losses = F.cross_entropy(outputs, y_, reduction="none")
            optimizer.step(loss=losses)
        assert engine.steps == 5
        ends.append([p.detach() for p in model.parameters()])
    torch.testing.assert_close(*ends, rtol=0, atol=0)


def test_a_model_that_fabric_set_up_is_refused_with_what_to_do():
    fabric, (x, y) = Fabric(accelerator="cpu", precision="bf16-mixed"), data().tensors
    model = net().float()
    engine = PrivacyEngine(model, batch_size=12, sample_size=60, max_grad_norm=CLIP, noise_multiplier=1.0)
    optimizer = torch.optim.SGD(model.parameters(), LR)
    engine.attach(optimizer)
    losses = F.cross_entropy(fabric.setup_module(model)(x.float()), y, reduction="none")
    with pytest.raises(UnsupportedModel, match=r"Fabric's setup.*remedy: leave it out of fabric\.setup.*autocast"):
        optimizer.step(loss=losses)


@pytest.mark.parametrize("options", [{"barebones": True}, {"log_every_n_steps": 0}], ids=str)
def test_a_trainer_that_logs_nothing_trains_the_same(options):
    strategy = strategy_of()
    _, module = fit(strategy, **options)
    assert_same(module, wanted_of(strategy))


def test_bf16_is_near():
    def found(**options):
        strategy = strategy_of()
        module = Classifier().float()
        x, y = data().tensors
        fit(strategy, module, loader=DataLoader(TensorDataset(x.float(), y), batch_size=4), **options)
        return [p.detach() for p in module.parameters()]

    plain, rounded, start = found(), found(precision="bf16-mixed"), [p.detach().float() for p in net().parameters()]
    moved = sum(float((p - q).norm()) ** 2 for p, q in zip(plain, start, strict=True))
    off = sum(float((p - q).norm()) ** 2 for p, q in zip(plain, rounded, strict=True))
    assert 0 < off < 0.05**2 * moved


class Planned(Classifier):
    """Asks for the train loader before there is an optimizer."""

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=LR, momentum=0.5)
        steps = self.trainer.estimated_stepping_batches
        assert steps == 10
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LR, total_steps=steps)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


@pytest.mark.parametrize(
    ("at", "kind"), [(7, Classifier), (5, Classifier), (7, Planned)], ids=["in an epoch", "between epochs", "planned"]
)
def test_resumed_training_is_the_same(at, kind, tmp_path):
    saved = ModelCheckpoint(dirpath=tmp_path, every_n_train_steps=at, save_top_k=-1, filename="{step}")
    _, whole = fit(strategy_of(), kind(), callbacks=[saved])
    strategy = strategy_of(seed=8)  # another key, until it is resumed
    trainer, module = fit(strategy, kind(), ckpt_path=tmp_path / f"step={at}.ckpt")
    assert trainer.global_step == strategy.engine.steps == 10 and trainer.current_epoch == 2
    assert_same(module, list(whole.parameters()))


def test_resumed_training_has_fresh_noise_and_epsilon_does_not_fall(tmp_path):
    saved = ModelCheckpoint(dirpath=tmp_path, every_n_train_steps=5, save_top_k=-1, filename="{step}")
    first = strategy_of(None, noise_multiplier=1.0)
    trainer, whole = fit(first, callbacks=[saved])
    second = strategy_of(None, noise_multiplier=1.0)
    _, module = fit(second, ckpt_path=tmp_path / "step=5.ckpt")
    assert second.engine.privacy_spent() == first.engine.privacy_spent()
    assert all(not torch.equal(p, q) for p, q in zip(module.parameters(), whole.parameters(), strict=True))
    # the five steps after it were released as well
    trainer.fit(whole, DataLoader(data(), batch_size=4), ckpt_path=tmp_path / "step=5.ckpt")
    assert first.engine.privacy_spent().steps == 15


def test_training_once_more_goes_on_counting():
    strategy = strategy_of(None, noise_multiplier=1.0)
    trainer, module = fit(strategy, max_epochs=1)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, DataLoader(data(), batch_size=4))
    assert strategy.engine.privacy_spent().steps == 10
    trainer.fit_loop.max_epochs = 3
    with pytest.raises(Misuse, match="expected the module that this strategy has trained before, got another one"):
        trainer.fit(Classifier(), DataLoader(data(), batch_size=4))


def test_a_logger_that_uploads_checkpoints_would_publish_the_keys(tmp_path):
    logger = CSVLogger(tmp_path)
    logger._log_model = "all"  # as in wandb's, MLflow's and Lightning's own
    options = {"logger": logger, "default_root_dir": tmp_path, "max_epochs": 1}
    with pytest.raises(ValueError, match=r"expected no logger that uploads checkpoints .*, got CSVLogger: .*the keys"):
        fit(strategy_of(), callbacks=[ModelCheckpoint(tmp_path)], **options)
    fit(strategy_of(), callbacks=[ModelCheckpoint(tmp_path, save_weights_only=True)], **options)


def test_weights_alone_and_ordinary_checkpoints(tmp_path):
    saved = ModelCheckpoint(dirpath=tmp_path, filename="weights", save_weights_only=True)
    fit(strategy_of(), callbacks=[saved])
    assert "privacy_engine" not in torch.load(tmp_path / "weights.ckpt", weights_only=False)
    with pytest.raises(ValueError, match=r"expected 'privacy_engine' in the checkpoint to train on.*not be accounted"):
        fit(strategy_of(), ckpt_path=tmp_path / "weights.ckpt")


class Mean(Classifier):
    reduction = "mean"


class Without(Classifier):
    def configure_optimizers(self):
        return None


class Manual(Classifier):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False


class Weighted(Classifier):
    """By how often a class is in the batch, from the second epoch on."""

    def training_step(self, batch, batch_idx):
        losses = super().training_step(batch, batch_idx)
        weights = 1 / batch[1].bincount(minlength=3).clamp(min=1) if self.current_epoch else torch.ones(3)
        return losses * weights[batch[1]]


class Centred(Classifier):
    """Not in the first step, before which a few records are tried alone."""

    def training_step(self, batch, batch_idx):
        mean = batch[0].mean(0) if self.trainer.global_step else 0
        return super().training_step([batch[0] - mean, batch[1]], batch_idx)


class Divided(Classifier):
    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) / len(batch[1])


def test_labels_that_are_counted_in_a_later_epoch_are_refused():
    strategy = strategy_of(batch_size=30)
    with pytest.raises(UnsupportedModel, match=r"samples mix: the loss or the norm .* of sample \d"):
        fit(strategy, Weighted(), loader=DataLoader(data(), batch_size=60))
    assert strategy.engine.steps >= 2


class Sequences(Classifier):
    """Sums or averages over the places of a sequence; padding is 0."""

    means = False

    def on_train_epoch_start(self):
        self.places = 1

    def training_step(self, batch, batch_idx):
        x, y = batch
        self.seen.append(len(x))
        of_places = x.mean(self.places) if self.means else x.sum(self.places)
        losses = F.cross_entropy(self.net(of_places), y, reduction="none")
        self.log("largest", losses.max())
        return losses


class Means(Sequences):
    means = True


def in_one_length(records):
    return torch.nn.utils.rnn.pad_sequence([x for x, _ in records], batch_first=True), torch.tensor([0] * len(records))


def test_padding_that_changes_a_loss_is_refused():
    records = [(torch.ones(1 + i % 3, 6).double(), 0) for i in range(12)]
    loader = DataLoader(records, batch_size=12, collate_fn=in_one_length)
    with pytest.raises(Misuse, match=r"expected the loss of record 0 to be its own, .*pad all records to one length"):
        fit(strategy_of(), Means(), loader=loader)
    _, module = fit(strategy_of(), Sequences(), loader=loader, max_epochs=2)
    assert module.seen == [12, 12] and "log" not in vars(module)


class Centre(Classifier):
    """Keeps a mean of the records beside the network; or a number that is in no checkpoint."""

    def __init__(self, persistent):
        super().__init__()
        self.register_buffer("centre", torch.zeros(6).double(), persistent=persistent)

    def training_step(self, batch, batch_idx):
        self.centre.mul_(0.5).add_(0.5 * batch[0].mean(0))
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("persistent", [True, False])
def test_records_in_a_buffer_beside_the_network_are_said(persistent):
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always", PrivacyWarning)
        fit(strategy_of(), Centre(persistent), max_steps=1)
    assert any("buffer 'centre' changed in training_step" in str(each.message) for each in found) == persistent


class Hooked(Classifier):
    """Numbers are halved and doubled on their way to the device, and mixed there after the first step if `mixes`."""

    def __init__(self, mixes=False):
        super().__init__()
        self.mixes = mixes

    def on_before_batch_transfer(self, batch, dataloader_idx):
        x, y = batch
        return x / 2, y

    def on_after_batch_transfer(self, batch, dataloader_idx):
        x, y = batch
        return 2 * ((x + x.roll(1, 0)) / 2 if self.mixes and self.trainer.global_step else x), y


def test_hooks_of_a_batch_on_its_way_see_the_pieces():
    (_, plain), (_, hooked) = fit(strategy_of()), fit(strategy_of(), Hooked(), validate=True)
    assert_same(hooked, plain.parameters())
    assert "_on_before_batch_transfer" not in vars(hooked)
    with pytest.raises(UnsupportedModel, match="what the model reads for sample 0 changes with the other samples"):
        fit(strategy_of(), Hooked(mixes=True))


def test_inputs_have_the_precision_of_the_trainer():
    strategy, module = strategy_of(), Classifier()
    module.net.float()
    fit(strategy, module, precision="bf16-true")
    assert strategy.engine.steps == 10


class Iterates(Classifier):
    def training_step(self, dataloader_iter):
        raise AssertionError


def test_several_train_loaders_and_their_iterator_are_refused_by_name():
    loaders = [DataLoader(data(), batch_size=4), DataLoader(data(), batch_size=4)]
    for module, loader in ((None, loaders), (None, dict(zip("ab", loaders, strict=True))), (Iterates(), loaders[0])):
        with pytest.raises(ValueError, match=r"^expected one train DataLoader with a private strategy, and training_"):
            fit(strategy_of(), module, loader=loader)


class Unpacks(Callback):
    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        _, _ = batch


class Decays(Classifier):
    def on_before_optimizer_step(self, optimizer):
        for p in self.parameters():
            p.grad = 0.1 * p.detach()


class Penalised(Classifier):
    def on_after_backward(self):
        Decays.on_before_optimizer_step(self, None)


class Scaled(Classifier):
    def backward(self, loss):
        (2 * loss).backward()


class EveryOther(Classifier):
    """Accumulates as Lightning's documentation does."""

    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure=None):
        if batch_idx % 2:
            optimizer.step(closure=optimizer_closure)
        else:
            optimizer_closure()


class Split(Classifier):
    """A body and a head."""

    def __init__(self):
        super().__init__()
        self.body, self.head = self.net[:2], self.net[2]
        del self.net

    def forward(self, x):
        return self.head(self.body(x))

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self(batch[0]), batch[1], reduction="none")


class Parts(Split):
    """Calls its parts, as Lightning's quickstart does."""

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.head(self.body(batch[0])), batch[1], reduction="none")


def test_the_plan_has_the_steps_of_a_limited_epoch():
    loader = DataLoader(data(), batch_sampler=BatchSampler(RandomSampler(data()), 4, False))
    for limit in (2, 0.4):
        strategy = strategy_of(None, noise_multiplier=None, target_epsilon=3.0)
        fit(strategy, loader=loader, limit_train_batches=limit)
        assert strategy.engine.steps == strategy.engine.settings.planned_steps == 4


def clips(trainer, module):
    trainer.gradient_clip_val = 1.0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"accumulate_grad_batches": 2}, "accumulate_grad_batches=1"),
        ({"callbacks": [GradientAccumulationScheduler({1: 2})]}, "expected no GradientAccumulationScheduler"),
        ({"gradient_clip_val": 1.0}, "gradient_clip_val=None"),
        ({"callbacks": [LambdaCallback(on_train_start=clips)]}, "gradient_clip_val=None"),
        ({"overfit_batches": 1}, "overfit_batches=0"),
        ({"module": Manual}, "automatic_optimization=True"),
        ({"module": Decays}, r"got one at parameter .* would be lost: .* optimizer\.register_step_pre_hook"),
        ({"module": Penalised}, r"got one at parameter .* would be lost"),
        ({"module": Scaled}, "expected Lightning's own backward with a private strategy, got the module's"),
        ({"module": EveryOther}, r"expected optimizer.step\(\) after each logical batch, got the next one before it"),
        ({"module": Without}, "expected the optimizer to hold every trainable parameter"),
        ({"loader": {"sampler": WeightedRandomSampler([1.0] * 60, 60)}}, "got WeightedRandomSampler"),
        ({"loader": {"drop_last": True}}, "got drop_last=True"),
        ({"loader": {"sampler": RandomSampler(data(), num_samples=16)}}, r"got RandomSampler\(num_samples=...\)"),
        ({"loader": {"sampler": RandomSampler(data(), replacement=True)}}, r"got RandomSampler\(replacement=True\)"),
        ({"callbacks": [LearningRateFinder()]}, "expected no tuner with a private strategy, got LearningRateFinder"),
        ({"callbacks": [Unpacks()]}, "expected batch.pieces, the physical batches of a step"),
        ({"module": Mean}, r"one loss a sample from training_step, shape \[\d+\], got shape \[\]"),
        ({"module": Centred}, "batch: samples mix: what the model reads for"),
        ({"module": Divided}, "expected the loss of record 0 to be its own"),
        ({"module": Parts}, r"call self\(...\) in training_step, or pass model="),
    ],
    ids=lambda x: x.replace(" ", "_") if isinstance(x, str) else "",
)
def test_what_cannot_be_private_is_refused_by_name(options, words):
    options = dict(options)
    module = options.pop("module", Classifier)()
    loader = DataLoader(data(), batch_size=4, **options.pop("loader", {}))
    with pytest.raises((ValueError, Misuse, UnsupportedModel), match=words) as error:
        fit(strategy_of(), module, loader=loader, **options)
    assert "\n" not in str(error.value)


class Thaws(BaseFinetuning):
    def freeze_before_training(self, module):
        self.freeze(module.body)

    def finetune_function(self, module, epoch, optimizer):
        if epoch == 1:
            self.unfreeze_and_add_param_group(module.body, optimizer, lr=0.1)


class Thawed(Split):
    def configure_optimizers(self):
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1)


def moved(before, module):
    return [not torch.equal(p, q) for p, q in zip(before, module.parameters(), strict=True)]


def test_a_frozen_body_may_be_in_the_optimizer_and_stays_as_it_is():
    module, before = Split(), [p.detach().clone() for p in Split().parameters()]
    module.body.requires_grad_(False)
    strategy = strategy_of()
    fit(strategy, module)
    assert strategy.engine.model is module.head and moved(before, module) == [False, False, True, True]


def test_a_body_that_is_thawed_in_a_later_epoch_is_trained_from_then_on():
    module, before, strategy = Thawed(), [p.detach().clone() for p in Thawed().parameters()], strategy_of()
    fit(strategy, module, callbacks=[Thaws()], max_epochs=1)
    assert moved(before, module) == [False, False, True, True]
    module, strategy = Thawed(), strategy_of()
    fit(strategy, module, callbacks=[Thaws()], max_epochs=2)
    assert moved(before, module) == [True] * 4 and strategy.engine.steps == 10


def test_tensor_parallelism_is_refused_by_name():
    with pytest.raises(ValueError, match="expected tensor_parallel_size=1 with a private strategy, got 2"):
        PrivateModelParallelStrategy(privacy={}, tensor_parallel_size=2)


class Talkative(LightningModule):
    """Logs, hands on more than losses, drops, counts epochs; and does what no program does, if told to."""

    def __init__(self, draws=False):
        super().__init__()
        torch.manual_seed(0)
        self.net, self.draws = nn.Sequential(nn.Linear(6, 5), nn.Dropout(0.3), nn.Linear(5, 3)).double(), draws
        self.outputs = []

    def training_step(self, batch, batch_idx):
        outputs = self.net(batch[0])
        if self.draws:
            outputs = outputs * random.random()
        losses = F.cross_entropy(outputs, batch[1], reduction="none") * (1 + self.current_epoch)
        self.log("largest", losses.max())
        self.log_dict({"epochs": float(self.current_epoch), "smallest": losses.min().item()})
        return {"loss": losses, "outputs": outputs.detach()}

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.outputs.append({name: x.sum() for name, x in outputs.items()})

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=LR, momentum=0.9)


def compiled(compile, tmp_path, **module):
    """Weights, what callbacks were handed, what was logged; and the strategy."""
    random.seed(0)
    strategy = strategy_of(noise_multiplier=1.0, sampling="shuffled", options={"compile": compile})
    logger = CSVLogger(tmp_path, name=str(compile))
    trained = Talkative(**module)
    torch.manual_seed(5)
    fit(strategy, trained, logger=logger, log_every_n_steps=1, max_epochs=3)
    with open(f"{logger.log_dir}/metrics.csv") as file:
        logged = [{name: float(x) for name, x in row.items() if x} for row in csv.DictReader(file)]
    return [*trained.parameters(), trained.outputs, logged], strategy


@pytest.mark.slow
def test_compiled_steps_are_those_of_the_eager_strategy(tmp_path):
    """What is logged in a program is an output of it."""
    (wanted, _), (found, strategy) = (compiled(compile, tmp_path) for compile in (False, True))
    assert strategy.programs.graphs.steps > 4
    assert strategy.engine.steps == 15
    assert len(found[-1]) == len(wanted[-1]) > 10
    assert {"largest", "smallest", "epochs"} <= found[-1][0].keys()
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)


def test_a_training_step_that_is_no_program_runs_eagerly_or_is_refused_by_name(tmp_path):
    (wanted, _), (found, strategy) = (compiled(compile, tmp_path, draws=True) for compile in (False, "auto"))
    assert strategy.programs.graphs.steps == 0
    assert re.search(r"random numbers of Python's|Random\.random", strategy.programs.graphs.ways["others"])
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)
    with pytest.raises(UnsupportedModel, match=r"it cannot be captured.*compile=False"):
        compiled(True, tmp_path, draws=True)
