"""Transformers' Trainer, private: each of its steps is the engine's, and the weights are those of DP-SGD by hand."""

import pickle
import warnings
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("accelerate", reason="accelerate, which transformers' Trainer needs, is not installed")
from by_hand import by_hand
from tiny import RECORDS, Records, loss_of, model_of
from transformers import BartConfig, BartForCausalLM, HfArgumentParser, Trainer, TrainerCallback, TrainingArguments

from dpbench import Misuse, PrivacyEngine
from dpbench.integrations.huggingface import PrivacyArguments, PrivateTrainer
from dpbench.integrations.transformers_losses import per_sample_losses
from dpbench.integrations.transformers_refusals import refuse

LR, CLIP = 0.5, 0.3
ADAM = {"optim": "adamw_torch", "learning_rate": 0.01}


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    monkeypatch.setenv("WANDB_DISABLED", "true")
    warnings.filterwarnings("ignore", message=".*can be repeated.*")


def arguments(folder, **options):
    known = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 8,
        "num_train_epochs": 2,
        "max_grad_norm": CLIP,
        "learning_rate": LR,
        "lr_scheduler_type": "constant",
        "optim": "sgd",
        "report_to": [],
        "use_cpu": True,
        "save_strategy": "no",
        "logging_steps": 2,
        "disable_tqdm": True,
    }
    return TrainingArguments(**{**known, **options})


def trainer_of(folder, kind="gpt2", *, cls=PrivateTrainer, model=None, privacy=None, data=None, more=None, **options):
    """With noise 0 and a seeded sampler unless `privacy` says otherwise."""
    known = {"noise_multiplier": 0.0, "generator": torch.Generator().manual_seed(3)}
    return cls(
        model=model_of(kind) if model is None else model,
        args=arguments(folder, **options),
        train_dataset=Records(kind) if data is None else data,
        privacy=PrivacyArguments(**(known if privacy is None else privacy)),
        **(more or {}),
    )


def same_as_by_hand(trainer, key, *, kind="gpt2", model=None):
    """Check the weights against those of a loop by hand, and return these."""
    model, data = model_of(kind) if model is None else model, Records(kind)
    run = {"steps": trainer.engine.steps, "clip": CLIP, "lr": lambda step: LR}
    wanted = by_hand(model, lambda net, i: loss_of(kind, net, data[i]), trainer.engine.settings, key, **run)
    assert_same(trainer.model, wanted)
    return wanted


def assert_same(model, wanted, atol=1e-12):
    found = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
    assert found.keys() == wanted.keys()
    for name, p in wanted.items():
        torch.testing.assert_close(found[name], p, rtol=0, atol=atol)


def trained(folder, kind="gpt2", **options):
    trainer = trainer_of(folder, kind, **options)
    trainer.train()
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters()}


# ------------------------------------------------------------------------------------------------ what is computed
@pytest.mark.parametrize(
    ("kind", "pieces", "options"),
    [
        *(("gpt2", (8, 1), {}), ("bert", (2, 4), {}), ("gpt2", (2, 4), {"dataloader_num_workers": 2})),
        ("gpt2", (1, 1), {"max_steps": 8}),
    ],
    ids=str,
)
def test_weights_are_those_of_a_loop_by_hand(kind, pieces, options, tmp_path):
    """Whatever is read ahead or padded, and also of batches without records."""
    privacy = {"noise_multiplier": 0.0, "generator": torch.Generator().manual_seed(3), "pad": pieces == (2, 4)}
    size = {"per_device_train_batch_size": pieces[0], "gradient_accumulation_steps": pieces[1]}
    trainer = trainer_of(tmp_path, kind, privacy=privacy, **size, **options)
    key, steps = trainer.engine._sampler.key, options.get("max_steps", 6)
    sizes = [len(trainer.engine._sampler.batch(step)) for step in range(steps)]
    assert (0 in sizes) == (pieces == (1, 1))
    trainer.train()
    assert trainer.state.global_step == trainer.engine.steps == steps
    wanted = same_as_by_hand(trainer, key, kind=kind)
    start = dict(model_of(kind).named_parameters())
    assert max(float((p - start[name].detach()).abs().max()) for name, p in wanted.items()) > 1e-2


def test_epsilon_is_that_of_the_engine_alone(tmp_path):
    size = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
    trainer = trainer_of(tmp_path, privacy={"target_epsilon": 3.0}, **size)
    engine = PrivacyEngine(
        model_of("gpt2"), batch_size=8, sample_size=RECORDS, epochs=2, max_grad_norm=CLIP, target_epsilon=3.0
    )
    assert trainer.engine.noise_multiplier == engine.noise_multiplier and trainer.engine.clip.sensitivity == CLIP
    model, optimizer = engine.model, torch.optim.SGD(engine.model.parameters(), lr=LR)
    engine.attach(optimizer)
    while engine.steps < 6:
        for batch in engine.data_loader(Records("gpt2")):
            optimizer.step(loss=per_sample_losses(model, batch)[0])
    trainer.train()
    assert trainer.engine.privacy_spent() == engine.privacy_spent()
    assert 2.9 < trainer.engine.privacy_spent().epsilon <= 3.0
    engine.detach()


def test_padding_counts_in_no_loss_whatever_its_label():
    model = model_of("gpt2")
    record = {name: x[None] for name, x in Records("gpt2")[0].items()}
    longer = {name: F.pad(x[:, :4], (0, 2), value=0) for name, x in record.items()}  # labels of padding: 0, not -100
    shorter = {name: x[:, :4] for name, x in record.items()}
    torch.testing.assert_close(per_sample_losses(model, longer)[0], per_sample_losses(model, shorter)[0])


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return trained(tmp_path_factory.mktemp("plain"))


def test_activation_checkpointing_changes_nothing(plain, tmp_path):
    for name, p in trained(tmp_path, gradient_checkpointing=True).items():
        torch.testing.assert_close(p, plain[name], rtol=0, atol=1e-12)


def test_bf16_is_near(tmp_path):
    plain = trained(tmp_path, model=model_of("gpt2", torch.float32))
    rounded = trained(tmp_path, model=model_of("gpt2", torch.float32), bf16=True)
    start = model_of("gpt2", torch.float32).state_dict()
    moved = sum(float((p - start[name]).norm()) ** 2 for name, p in plain.items())
    off = sum(float((p - plain[name]).norm()) ** 2 for name, p in rounded.items())
    assert 0 < off < 0.05**2 * moved


def test_lora_moves_the_adapters_alone(tmp_path):
    peft = pytest.importorskip("peft")

    def adapted():
        config = peft.LoraConfig(r=2, lora_alpha=4, target_modules=["c_attn"], fan_in_fan_out=True, lora_dropout=0.0)
        torch.manual_seed(1)
        model = peft.get_peft_model(model_of("gpt2"), config, autocast_adapter_dtype=False)
        return model.to(torch.float64)

    trainer = trainer_of(tmp_path, model=adapted(), per_device_train_batch_size=2, gradient_accumulation_steps=4)
    key = trainer.engine._sampler.key
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    trainer.train()
    wanted = same_as_by_hand(trainer, key, model=adapted())
    assert wanted and all("lora" in name for name in wanted)
    for name, p in trainer.model.named_parameters():
        assert torch.equal(p, before[name]) != ("lora" in name), name


# --------------------------------------------------------------------------------------------- losses of one's own
class Own(PrivateTrainer):
    """Halves each loss."""

    reduction = "none"

    def compute_loss(self, model, inputs, return_outputs=False, **options):
        found = super().compute_loss(model, inputs, return_outputs=return_outputs, **options)
        losses = found[0] if return_outputs else found
        losses = 0.5 * (losses if self.reduction == "none" else losses.mean())
        return (losses, found[1]) if return_outputs else losses


class Adversarial(PrivateTrainer):
    """Of embeddings moved by the sign of their own loss's gradient."""

    mode = False

    def compute_loss(self, model, inputs, return_outputs=False, **options):
        labels, mask = inputs["labels"], inputs["attention_mask"]
        words = model.get_input_embeddings()(inputs["input_ids"]).detach().requires_grad_()
        training = model.training
        model.train(self.mode)
        (gradient,) = torch.autograd.grad(adversarial(model, words, mask, labels).sum(), words)
        model.train(training)
        return adversarial(model, (words + 0.1 * gradient.sign()).detach(), mask, labels)


def adversarial(model, words, mask, labels):
    return per_sample_losses(model, {"inputs_embeds": words, "attention_mask": mask, "labels": labels})[0]


def test_adversarial_inputs_are_found_in_eval_mode(tmp_path):
    trainer = trainer_of(tmp_path, cls=Adversarial, max_steps=2)
    key, settings = trainer.engine._sampler.key, trainer.engine.settings
    trainer.train()
    data = [{name: x[None] for name, x in record.items()} for record in Records("gpt2")]
    run = {"steps": 2, "clip": CLIP, "lr": lambda step: LR}
    assert_same(
        trainer.model, by_hand(model_of("gpt2"), lambda m, i: trainer.compute_loss(m, data[i])[0], settings, key, **run)
    )
    with pytest.raises(Misuse, match="find adversarial inputs in eval mode"):
        trainer_of(tmp_path, cls=type("Trained", (Adversarial,), {"mode": True}), max_steps=1).train()


class Batch(Own):
    reduction = "mean"


def test_a_compute_loss_of_ones_own(plain, tmp_path):
    for name, p in trained(tmp_path, cls=Own, max_grad_norm=CLIP / 2, learning_rate=2 * LR).items():
        torch.testing.assert_close(p, plain[name], rtol=0, atol=1e-12)


def test_a_compute_loss_func_and_its_evaluation(tmp_path):
    def function(outputs, labels, num_items_in_batch=None):
        return F.cross_entropy(outputs.logits, labels, reduction="none")

    trainer = trainer_of(tmp_path, "bert", more={"compute_loss_func": function, "eval_dataset": Records("bert", 8)})
    plain = trainer_of(tmp_path, "bert", more={"eval_dataset": Records("bert", 8)})
    for each in (trainer, plain):
        each.train()
    assert_same(trainer.model, dict(plain.model.named_parameters()))
    assert trainer.evaluate()["eval_loss"] == pytest.approx(plain.evaluate()["eval_loss"], abs=1e-6)


def test_a_loss_of_the_model_s_own_is_refused(tmp_path):
    """One that is set, and one whose labels transformers does not shift."""
    own = model_of("gpt2")
    own.loss_function = lambda logits, labels, vocab_size, **rest: 1.01 * F.cross_entropy(logits[0], labels[0])
    size = {"vocab_size": 40, "d_model": 8, "decoder_layers": 1, "decoder_attention_heads": 2, "decoder_ffn_dim": 8}
    bart = BartConfig(**size, max_position_embeddings=8, is_decoder=True, is_encoder_decoder=False)
    for model in (own, BartForCausalLM(bart)):
        with pytest.raises(Misuse, match=f"the loss of {type(model).__name__} .* give compute_loss_func") as caught:
            trainer_of(tmp_path, model=model).train()
        assert "\n" not in str(caught.value)


def test_labels_of_padding_are_no_other_loss(tmp_path):
    data = [{**r, "labels": r["input_ids"]} for r in Records("gpt2", 8)]
    data[0] = {**data[0], "labels": torch.full((6,), -100)}  # transformers' loss of it is 0 / 0
    trainer_of(tmp_path, data=data, max_steps=1).train()


def test_a_loss_over_the_batch_is_refused(tmp_path):
    with pytest.raises(Misuse, match=r"one loss a sample from compute_loss, shape \[\d+\], got shape \[\].*reduction"):
        trainer_of(tmp_path, cls=Batch).train()


def test_a_model_of_unknown_loss_is_refused(tmp_path):
    class Other(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = torch.nn.Embedding(40, 4)

        def forward(self, input_ids, labels=None):
            return {"logits": self.inner(input_ids)}

    with pytest.raises(Misuse, match="got Other, whose loss a sample is not known: override compute_loss"):
        trainer_of(tmp_path, model=Other()).train()


# ---------------------------------------------------------------------------------------------- Trainer's own course
def test_callbacks_logs_best_model_and_card(tmp_path):
    seen = []

    class Watch(TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, model=None, **_):
            self.before = [p.detach().clone() for p in model.parameters()]

        def on_optimizer_step(self, args, state, control, model=None, **_):
            seen.append(any(not torch.equal(a, b) for a, b in zip(self.before, model.parameters(), strict=True)))

        def on_substep_end(self, args, state, control, **_):
            seen.append("substep")

    trainer = trainer_of(
        tmp_path,
        privacy={"noise_multiplier": 1.0},
        more={"callbacks": [Watch()], "eval_dataset": Records("gpt2", 8)},
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        eval_strategy="steps",
        eval_steps=3,
        save_strategy="steps",
        save_steps=3,
        load_best_model_at_end=True,
        include_num_input_tokens_seen="all",
    )
    trainer.train()
    assert seen == ["substep", True] * 6
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert [entry["step"] for entry in logged] == [2, 4, 6]
    assert [entry["epsilon"] for entry in logged] == sorted({entry["epsilon"] for entry in logged})
    assert logged[-1]["epsilon"] == trainer.engine.privacy_spent().epsilon > 0
    assert all(0 < entry["loss"] < 1e3 and "grad_norm" not in entry for entry in logged)  # of what noise has moved
    drawn = sum(len(trainer.engine._sampler.batch(step)) for step in range(6))
    assert trainer.state.num_input_tokens_seen == 6 * drawn
    assert trainer.state.best_model_checkpoint is not None
    best = Path(trainer.state.best_model_checkpoint)
    assert trainer.engine.steps == 6 and (best / "privacy_engine_0.pt").stat().st_mode & 0o077 == 0
    trainer.create_model_card(model_name="tiny")
    card = (tmp_path / "README.md").read_text()
    assert str(trainer.engine.privacy_spent()) in card and "## Privacy" in card


class Accumulates(TrainerCallback):
    """4 turns a step from the second epoch on; the logical batch stays as it is."""

    def on_epoch_begin(self, args, state, control, **_):
        args.gradient_accumulation_steps = 4 if state.global_step else 2


def test_a_callback_that_accumulates_more_takes_fewer_steps(tmp_path):
    size = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
    trainer = trainer_of(tmp_path, more={"callbacks": [Accumulates()]}, **size)
    key = trainer.engine._sampler.key
    trainer.train()
    assert trainer.state.global_step == trainer.engine.steps == 5
    same_as_by_hand(trainer, key)


def test_the_logged_loss_is_the_mean_of_the_records(tmp_path):
    trainer = trainer_of(
        tmp_path, per_device_train_batch_size=2, gradient_accumulation_steps=4, logging_steps=1, learning_rate=0.0
    )
    trainer.train()
    model, data = model_of("gpt2").train(), Records("gpt2")
    losses = per_sample_losses(model, torch.utils.data.default_collate(list(data)))[0]
    for entry in trainer.state.log_history[:6]:
        batch = trainer.engine._sampler.batch(entry["step"] - 1)
        assert entry["loss"] == pytest.approx(float(losses[batch].mean()), rel=1e-5)


def test_the_command_line_has_both(tmp_path):
    parser = HfArgumentParser((TrainingArguments, PrivacyArguments))
    words = f"--output_dir {tmp_path} --max_grad_norm 0.7 --target_epsilon 4 --sampling shuffled --use_cpu True"
    args, privacy = parser.parse_args_into_dataclasses(words.split())
    assert (args.max_grad_norm, privacy.target_epsilon, privacy.sampling) == (0.7, 4.0, "shuffled")
    assert privacy.for_engine(args.max_grad_norm)["max_grad_norm"] == 0.7
    assert PrivacyArguments(max_grad_norm=2.0).for_engine(0.7)["max_grad_norm"] == 2.0


def test_its_arguments_are_those_of_the_engine():
    import inspect

    of_engine = inspect.signature(PrivacyEngine.__init__).parameters.keys()
    assert PrivacyArguments().for_engine(1.0).keys() <= of_engine
    elsewhere = {"self", "model", "batch_size", "sample_size", "epochs", "steps", "ghost_clipping", "mixed"}
    assert of_engine - PrivacyArguments().for_engine(1.0).keys() == elsewhere


# ------------------------------------------------------------------------------------------------------------ resume
@pytest.mark.parametrize(
    "at", [pytest.param(2, id="in an epoch"), pytest.param(3, id="between epochs", marks=pytest.mark.slow)]
)
def test_resumed_training_is_the_same(at, tmp_path):
    options = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "lr_scheduler_type": "linear"}
    whole = trainer_of(tmp_path, save_strategy="steps", save_steps=at, **options)
    whole.train()
    other = {"noise_multiplier": 0.0, "generator": torch.Generator().manual_seed(8)}  # another key, until it is resumed
    resumed = trainer_of(tmp_path, privacy=other, **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{at}"))
    assert_same(resumed.model, dict(whole.model.named_parameters()))
    assert resumed.state.global_step == resumed.engine.steps == 6 and resumed.state.epoch == whole.state.epoch


def test_resumed_training_has_fresh_noise_and_the_same_epsilon(tmp_path):
    privacy = {"noise_multiplier": 1.0}
    whole = trainer_of(tmp_path, privacy=privacy, save_strategy="steps", save_steps=3)
    whole.train()
    resumed = trainer_of(tmp_path, privacy=privacy)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert resumed.engine.privacy_spent() == whole.engine.privacy_spent()
    pairs = zip(resumed.model.parameters(), whole.model.parameters(), strict=True)
    assert all(not torch.equal(p, q) for p, q in pairs)
    spent = whole.engine.privacy_spent()
    whole.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))  # the three steps after it were released as well
    assert whole.engine.privacy_spent().steps == spent.steps + 3
    assert whole.engine.privacy_spent().epsilon > spent.epsilon


def test_the_last_checkpoint_and_training_once_more(tmp_path):
    trainer = trainer_of(tmp_path, privacy={"noise_multiplier": 1.0}, save_strategy="steps", save_steps=3, max_steps=3)
    trainer.train()
    more = trainer_of(tmp_path, privacy={"noise_multiplier": 1.0}, max_steps=4)
    more.train(resume_from_checkpoint=True)
    assert more.engine.steps == 4
    more.train()  # from the weights as they are, counted from 0 by Trainer, and on top by the engine
    assert more.state.global_step == 4 and more.engine.privacy_spent().steps == 8


def test_model_and_optimizer_are_ordinary_after_training(tmp_path):
    trainer = trainer_of(tmp_path, privacy={"noise_multiplier": 1.0})
    trainer.train()
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    assert pickle.loads(pickle.dumps(trainer.engine)).steps == 6
    trainer.model(**{name: x[None] for name, x in Records("gpt2")[0].items()}).loss.backward()
    trainer.optimizer.step()
    assert not all(torch.equal(p, before[name]) for name, p in trainer.model.named_parameters())
    Trainer(trainer.model, arguments(tmp_path), train_dataset=Records("gpt2")).train()
    trainer.train()
    assert trainer.engine.privacy_spent().steps == trainer.engine.steps == 12


def test_a_checkpoint_of_an_ordinary_trainer_is_refused(tmp_path):
    ordinary = Trainer(
        model=model_of("gpt2"),
        args=arguments(tmp_path, save_strategy="steps", save_steps=3),
        train_dataset=Records("gpt2"),
    )
    ordinary.train()
    with pytest.raises(ValueError, match=r"expected privacy_engine_0\.pt in the checkpoint.*not be accounted; go on"):
        trainer_of(tmp_path).train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))


def test_a_checkpoint_of_other_settings_is_refused(tmp_path):
    trainer_of(tmp_path, save_strategy="steps", save_steps=2, max_steps=2).train()
    with pytest.raises(ValueError, match=r"expected batch_size=8 as in the checkpoint, got 4"):
        trainer_of(tmp_path, per_device_train_batch_size=4).train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))


# ----------------------------------------------------------------------------------------------------- what is refused
class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(Records("gpt2"))


class Sized(Stream):
    def __len__(self):
        return RECORDS


def overriding(name):
    return type("Own", (PrivateTrainer,), {name: lambda self, *args: None})


REENTRANT = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}}
REFUSED = [
    ({"train_sampling_strategy": "group_by_length"}, "train_sampling_strategy='random'"),
    ({"dataloader_drop_last": True}, "dataloader_drop_last=False"),
    ({"label_smoothing_factor": 0.1}, "label_smoothing_factor=0"),
    ({"auto_find_batch_size": True}, "auto_find_batch_size=False"),
    ({"neftune_noise_alpha": 5.0}, r"neftune_noise_alpha=None .*got 5\.0: .*longest record"),
    ({"optim": "galore_adamw_layerwise", "optim_target_modules": ["mlp"]}, "optim='adamw_torch'"),
    (REENTRANT, "(activation|gradient)_checkpointing_kwargs="),
    ({"torch_compile": True}, "torch_compile=False"),
    ({"push_to_hub": True, "hub_strategy": "checkpoint"}, "hub_strategy='end'"),
    ({"max_grad_norm": 0.0}, r"max_grad_norm=C > 0 with PrivateTrainer, got 0\.0: "),
    ({"max_grad_norm": None}, "max_grad_norm=C > 0 with PrivateTrainer, got None: "),
    ({"cls": overriding("_get_train_sampler")}, "_get_train_sampler=Trainer's own .*, got another one: "),
    ({"cls": overriding("get_train_dataloader")}, "get_train_dataloader=.*, got another one: "),
    ({"cls": overriding("training_step")}, "training_step=PrivateTrainer's own .*, got another one: "),
    ({"data": Stream()}, r"train_dataset=.*, got Stream: batches are drawn as privacy\.sampling says"),
    ({"data": Sized()}, "train_dataset=.*, got Sized: "),
    ({"more": {"model_init": lambda: model_of("gpt2")}}, "model_init=None"),
]


@pytest.mark.parametrize(("options", "words"), REFUSED, ids=lambda x: x.partition("=")[0] if isinstance(x, str) else "")
def test_what_cannot_be_private_is_refused_by_name(options, words, tmp_path):
    with pytest.raises(ValueError, match=f"^expected {words}") as error:
        trainer_of(tmp_path, **options)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [("fp16", True, "fp16=False .*: .* take bf16"), ("fsdp", "full_shard", "fsdp='' .* 'full_shard': .*fully_shard")],
)
def test_what_needs_a_gpu_is_refused_by_name(name, value, words, tmp_path):
    args = arguments(tmp_path)
    setattr(args, name, value)  # TrainingArguments refuse it elsewhere
    with pytest.raises(ValueError, match=f"expected {words}"):
        PrivateTrainer(model_of("gpt2"), args, train_dataset=Records("gpt2"), privacy=PrivacyArguments())


@pytest.mark.parametrize(
    ("tracker", "variable", "value"),
    [("wandb", "WANDB_LOG_MODEL", "checkpoint"), ("mlflow", "HF_MLFLOW_LOG_ARTIFACTS", "1"), ("clearml", None, "true")],
)
def test_a_tracker_that_uploads_checkpoints_would_publish_the_keys(tracker, variable, value, tmp_path, monkeypatch):
    if variable is not None:
        monkeypatch.setenv(variable, value)
    with pytest.raises(ValueError, match=f"^expected {variable or 'CLEARML_LOG_MODEL'}='false' .*, got '{value}': "):
        trainer_of(tmp_path, report_to=[tracker], save_strategy="steps")
    whole = {"args": arguments(tmp_path, report_to=[tracker], save_strategy="steps", save_only_model=True)}
    refuse(PrivateTrainer.__new__(PrivateTrainer), {**whole, "privacy": PrivacyArguments()})  # weights alone may be


@pytest.mark.parametrize("variable", ["ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_MEGATRON_LM"])
def test_a_launcher_that_shards_is_refused_by_its_variable(variable, tmp_path, monkeypatch):
    args = arguments(tmp_path)
    monkeypatch.setenv(variable, "true")
    with pytest.raises(ValueError, match=f"^expected {variable}='false' .*, got 'true': accelerate launch shards"):
        PrivateTrainer(model_of("gpt2"), args, train_dataset=Records("gpt2"), privacy=PrivacyArguments())


def test_workers_start_as_the_arguments_say(tmp_path):
    options = {"dataloader_num_workers": 1, "dataloader_multiprocessing_context": "spawn"}
    loader = trainer_of(tmp_path, **options)._loader()._loader
    assert loader.multiprocessing_context.get_start_method() == "spawn"


def test_what_there_is_to_train_on_and_with_is_asked_for(tmp_path):
    privacy = PrivacyArguments(noise_multiplier=1.0)
    trainer = PrivateTrainer(model_of("gpt2"), arguments(tmp_path), eval_dataset=Records("gpt2", 8), privacy=privacy)
    assert trainer.engine is None and trainer.evaluate()["eval_loss"] > 0
    with pytest.raises(ValueError, match="expected a train_dataset to train on, got none: give it when"):
        trainer.train()
    with pytest.raises(ValueError, match=r"^expected privacy=PrivacyArguments\(\.\.\.\) .*, got dict: "):
        PrivateTrainer(model_of("gpt2"), arguments(tmp_path), train_dataset=Records("gpt2"), privacy={})
    with pytest.raises(Misuse, match="without hyperparameter_search"):
        trainer.hyperparameter_search()


@pytest.mark.slow
@pytest.mark.parametrize("how", ["gpt2", "bert", "bf16", "lora"])
def test_compiled_steps_are_those_of_the_eager_trainer(how, tmp_path):
    """Accumulation, padding and mixed precision inside a program; with a generator nothing is timed."""
    kind, dtype = ("bert" if how == "bert" else "gpt2"), torch.float32 if how == "bf16" else torch.float64

    def model():
        torch.manual_seed(1)
        made = model_of(kind, dtype)
        if how != "lora":
            return made
        peft = pytest.importorskip("peft")
        return peft.get_peft_model(made, peft.LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True))

    ends, size = [], {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "num_train_epochs": 4}
    for compile in (False, "auto"):
        privacy = {"noise_multiplier": 1.0, "generator": torch.Generator().manual_seed(3), "pad": True}
        privacy |= {"compile": compile}
        trainer = trainer_of(tmp_path, kind, model=model(), privacy=privacy, bf16=how == "bf16", **size)
        trainer.train()
        ends.append({n: p.detach().clone() for n, p in trainer.model.named_parameters() if p.requires_grad})
    assert trainer.programs.graphs.steps > 4, trainer.programs.graphs.ways
    assert trainer.engine.steps == trainer.state.global_step == 12
    assert_same(trainer.model, ends[0], atol=1e-3 if how == "bf16" else 1e-12)
