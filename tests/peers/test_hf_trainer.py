"""`fds.hf.Trainer` beside transformers' own, alone, over DeepSpeed and under TRL: real models and processes."""

import json
import os
import shutil

import pytest
import torch

import fds
from fds.errors import ComposeError, ConfigError, StorageError
from tests.bits import assert_same_bits
from tests.peers.hf_trainer import CASES, UPDATES
from tests.peers.launch import torchrun
from tests.peers.trainer import model, padded, rows, settings

pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")]
QUIET = {"use_cpu": True, "report_to": [], "disable_tqdm": True, "dataloader_pin_memory": False, "logging_steps": 1}


@pytest.fixture(autouse=True)
def no_logs(monkeypatch):
    import transformers

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


def theirs():
    import transformers

    return transformers.Trainer


def arguments(out, **more):
    import transformers

    defaults = {"save_strategy": "no", "max_steps": UPDATES, "weight_decay": 0.1}
    return transformers.TrainingArguments(output_dir=str(out), **QUIET, **settings(**{**defaults, **more}))


def trainer(kind, out, *, module=None, callbacks=(), step=None, config=None, resume=None, train=True, **more):
    """Return a trainer of a class that has trained on eleven batches an epoch: of an odd number in twos."""
    data = rows(1)
    ours = {} if step is None and config is None else {"step": step, "config": config}
    made = kind(
        model() if module is None else module,
        arguments(out, **more),
        train_dataset=data[:44],
        eval_dataset=data[44:60],
        data_collator=padded,
        callbacks=list(callbacks),
        **ours,
    )
    if train:
        made.train(resume_from_checkpoint=resume)
    return made


def logged(made):
    timed = ("runtime", "second")
    return [{k: v for k, v in entry.items() if not any(t in k for t in timed)} for entry in made.state.log_history]


def assert_logs_agree(made, other, rtol=1e-5):
    for got, want in zip(logged(made), logged(other), strict=True):
        assert got.keys() == want.keys()
        torch.testing.assert_close(
            list(map(float, got.values())), list(map(float, want.values())), rtol=rtol, atol=1e-9
        )


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"label_smoothing_factor": 0.1, "lr_scheduler_type": "cosine"},
        {"max_grad_norm": 0.0, "optim": "sgd", "lr_scheduler_type": "inverse_sqrt"},
        {"gradient_accumulation_steps": 1, "average_tokens_across_devices": False, "activation_checkpointing": True},
    ],
    ids=["plain", "smoothed", "sgd", "checkpointed"],
)
def test_arguments_train_what_their_trainer_trains(more, tmp_path):
    ours, other = trainer(fds.hf.Trainer, tmp_path, **more), trainer(theirs(), tmp_path, **more)
    assert_logs_agree(ours, other)
    assert len(logged(ours)) == UPDATES + 1
    for (name, got), want in zip(ours.model.named_parameters(), other.model.parameters(), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-5, msg=name)


def test_a_composition_trains_on_the_loss_of_the_trainer_and_a_step_on_its_own(tmp_path):
    plain = {"learning_rate": 5e-5, "adam_epsilon": 1e-8, "max_grad_norm": 1.0, "warmup_steps": 0, "weight_decay": 0.0}
    composed = fds.compose(fds.clip_by_global_norm(0.7), fds.adamw(1e-2, eps=1e-3, weight_decay=0.0))
    ours = trainer(fds.hf.Trainer, tmp_path, step=composed, max_steps=8, **plain)
    constant = {"lr_scheduler_type": "constant", "warmup_steps": 0, "weight_decay": 0.0, "max_steps": 8}
    assert_logs_agree(ours, trainer(theirs(), tmp_path, **constant))

    def counted(params, batch):
        return fds.Mean(apply(params, **batch, num_items_in_batch=1).loss, (batch["labels"][:, 1:] != -100).sum())

    apply, _, _ = fds.functional(model())
    again = trainer(fds.hf.Trainer, tmp_path, step=composed(counted), max_steps=8, **plain)
    assert_logs_agree(again, ours)


def test_evaluations_best_model_early_stop_and_limit_are_theirs(tmp_path):
    import transformers
    from transformers import AutoModelForCausalLM, EarlyStoppingCallback

    read = []

    class Reads(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, model=None, **_):
            read.append(float(model.lm_head.weight.detach().double().sum()))

    def run(kind, out):
        callbacks = [EarlyStoppingCallback(2), Reads()]
        every = {"save_steps": 4, "eval_strategy": "steps", "eval_steps": 4, "save_strategy": "steps"}
        kept = {"save_total_limit": 2, "load_best_model_at_end": True, "greater_is_better": True}  # the first is best
        return trainer(kind, out, callbacks=callbacks, **kept, **every)

    ours, other = run(fds.hf.Trainer, tmp_path / "ours"), run(theirs(), tmp_path / "theirs")
    half = len(read) // 2
    assert half == 12  # it stopped early
    torch.testing.assert_close(read[:half], read[half:], rtol=1e-3, atol=1e-3)
    assert_logs_agree(ours, other)
    saved = sorted(path.name for path in (tmp_path / "ours").iterdir())
    assert saved == sorted(path.name for path in (tmp_path / "theirs").iterdir()) and len(saved) == 2
    best = ours.state.best_model_checkpoint
    assert os.path.basename(best) == os.path.basename(other.state.best_model_checkpoint) == "checkpoint-4"
    assert ours.evaluate()["eval_loss"] == ours.state.best_metric
    assert_same_bits(ours.model.state_dict(), AutoModelForCausalLM.from_pretrained(best).state_dict())
    assert_same_bits(ours.step.params(ours.step_state), dict(ours.model.named_parameters()))
    ours.save_model(str(tmp_path / "saved"))
    assert_same_bits(ours.model.state_dict(), AutoModelForCausalLM.from_pretrained(tmp_path / "saved").state_dict())


def test_a_run_that_goes_on_in_the_middle_of_an_epoch_is_the_run_that_was_not_stopped(tmp_path):
    module = lambda: model().requires_grad_(True)
    saves = {"save_strategy": "steps", "save_steps": 8, "max_steps": 14, "lr_scheduler_type": "cosine"}
    whole = trainer(fds.hf.Trainer, tmp_path, module=module(), **saves)
    shutil.rmtree(tmp_path / "checkpoint-14")
    again = trainer(fds.hf.Trainer, tmp_path, module=module(), resume=True, **saves)
    assert_same_bits(again.step_state, whole.step_state)
    assert_same_bits(again.model.state_dict(), whole.model.state_dict())
    late = [entry for entry in logged(whole) if entry["step"] > 8][:-1]  # the last one sums the losses of a call
    assert late == [entry for entry in logged(again) if entry["step"] > 8][:-1] and len(late) == 6
    shutil.rmtree(tmp_path / "checkpoint-8" / "fds")
    with pytest.raises(StorageError, match="no state of a step"):
        trainer(fds.hf.Trainer, tmp_path, resume=str(tmp_path / "checkpoint-8"), **saves)


def test_dropout_draws_from_the_key_and_frozen_parameters_stay(tmp_path):
    def run():
        module = model()
        module.config.attention_dropout = 0.3
        for layer in module.model.layers:
            layer.self_attn.attention_dropout = 0.3
        module.model.embed_tokens.requires_grad_(False)
        return trainer(fds.hf.Trainer, tmp_path, module=module, max_steps=4)

    one, two = run(), run()
    assert_same_bits(one.step_state, two.step_state)
    assert_same_bits(one.model.model.embed_tokens.weight.detach(), model().model.embed_tokens.weight.detach())
    assert len(one.step_state.opt["exp_avg"]) < len(dict(model().named_parameters()))


def test_what_is_not_followed_is_refused(tmp_path):
    import transformers

    class Mine(fds.hf.Trainer):
        def create_optimizer(self, model=None):
            return super().create_optimizer(model)

    adamw = fds.compose(fds.adamw(1e-3))
    sgd = torch.optim.SGD([torch.zeros(1)], 0.1)
    defaults = transformers.TrainingArguments(str(tmp_path))
    plain = {name: getattr(defaults, name) for name in settings() if name != "gradient_accumulation_steps"}
    plain["weight_decay"] = 0.0
    make = lambda kind=fds.hf.Trainer, **more: trainer(kind, tmp_path, train=False, **more)
    for refused, kind, where in (
        (lambda: make(torch_compile=True), ConfigError, "args.torch_compile"),
        (lambda: make(step=adamw, config={}), ConfigError, "step=, config="),
        (lambda: make(step=3), ComposeError, "step="),
        (lambda: make(step=adamw), ConfigError, "args.learning_rate"),
        (lambda: make(Mine), ConfigError, "Mine.create_optimizer"),
        (lambda: fds.hf.Trainer(model(), arguments(tmp_path), optimizers=(sgd, None)), ConfigError, "optimizers="),
        (lambda: trainer(fds.hf.Trainer, tmp_path, optim="adafactor"), ConfigError, "args.optim"),
        (
            lambda: trainer(fds.hf.Trainer, tmp_path, lr_scheduler_type="reduce_lr_on_plateau", eval_strategy="epoch"),
            ConfigError,
            "args.lr_scheduler_type",
        ),
        (
            lambda: trainer(fds.hf.Trainer, tmp_path, step=fds.compose(fds.accumulate(3), fds.adamw(1e-3)), **plain),
            ComposeError,
            "args.gradient_accumulation_steps",
        ),
        (lambda: trainer(fds.hf.Trainer, tmp_path, config={}), ConfigError, "args.max_grad_norm"),
    ):  # fmt: skip
        with pytest.raises(kind) as caught:
            refused()
        assert where in caught.value.where, caught.value


@pytest.mark.parametrize("more", [{}, {"packing": True, "max_length": 16}], ids=["padded", "packed"])
def test_a_trainer_of_trl_trains_what_it_trains(more, tmp_path):
    import datasets
    import trl
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({str(i): i for i in range(31)}, unk_token="0"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="0", eos_token="1", unk_token="0")
    datasets.disable_progress_bars()
    data = datasets.Dataset.from_list([{"input_ids": row} for row in rows(1)[:44]])

    class Ours(fds.hf.Trainer, trl.SFTTrainer):
        pass

    def run(kind):
        given = {key: value for key, value in settings(max_steps=8).items() if key != "warmup_steps"}
        made = trl.SFTConfig(output_dir=str(tmp_path), bf16=False, save_strategy="no", **QUIET, **given, **more)
        trained = kind(model(), made, train_dataset=data, processing_class=tokenizer)
        trained.train()
        return trained

    ours, other = run(Ours), run(trl.SFTTrainer)
    assert "mean_token_accuracy" in logged(ours)[0]
    assert_logs_agree(ours, other)


def test_a_model_of_peft_trains_saves_and_goes_on_as_with_their_trainer(tmp_path):
    import peft

    def adapted():
        config = peft.LoraConfig(r=2, lora_alpha=4, target_modules="all-linear", task_type="CAUSAL_LM")
        base = model()
        torch.manual_seed(1)
        return peft.get_peft_model(base, config)

    given = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}  # matrices alone are trained: all decay
    other = trainer(theirs(), tmp_path / "theirs", module=adapted(), **given)
    ours = trainer(fds.hf.Trainer, tmp_path / "ours", module=adapted(), **given)
    assert_logs_agree(ours, other)
    again = peft.PeftModel.from_pretrained(model(), tmp_path / "ours" / "checkpoint-4").eval()
    with torch.no_grad():
        seen = [made(**padded(rows(1)[:4])).logits for made in (again, ours.model.eval())]
    assert torch.equal(*seen)
    checkpoint = str(tmp_path / "ours" / "checkpoint-2")
    resumed = trainer(fds.hf.Trainer, tmp_path / "ours", module=adapted(), resume=checkpoint, **given)
    assert [entry.get("loss") for entry in logged(resumed)[:4]] == [entry.get("loss") for entry in logged(ours)[:4]]


def test_a_sequence_to_sequence_trainer_predicts_by_generating(tmp_path):
    import transformers

    class Ours(fds.hf.Trainer, transformers.Seq2SeqTrainer):
        pass

    small = {"vocab_size": 31, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2}
    config = transformers.T5Config(**small, dropout_rate=0.0, decoder_start_token_id=0, pad_token_id=0)

    def run(kind):
        torch.manual_seed(0)
        given = {**settings(max_steps=4), "predict_with_generate": True, "generation_max_length": 6}
        made = transformers.Seq2SeqTrainingArguments(output_dir=str(tmp_path), save_strategy="no", **QUIET, **given)
        trained = kind(
            transformers.T5ForConditionalGeneration(config),
            made,
            train_dataset=rows(1)[:44],
            data_collator=padded,
            compute_metrics=lambda seen: {"tokens": float((seen.predictions > 0).sum())},
        )
        trained.train()
        seen = trained.predict(rows(1)[:4])
        return trained, [seen.metrics["test_loss"]], [seen.metrics["test_tokens"], seen.predictions.tolist()]

    (ours, loss, got), (other, want_loss, want) = run(Ours), run(transformers.Seq2SeqTrainer)
    assert_logs_agree(ours, other)
    assert got == want
    torch.testing.assert_close(loss, want_loss, rtol=1e-5, atol=0.0)


def test_two_ranks_save_read_and_go_on_at_another_stage_and_train_what_trl_trains(tmp_path):
    torchrun("tests.peers.hf_trainer", tmp_path / "out", "stopped", ranks=2)
    seen = json.loads((tmp_path / "out").read_text())
    assert seen["again"] == seen["whole"] and len(seen["whole"]) == 4
    torch.testing.assert_close(seen["other"], seen["whole"], rtol=1e-5, atol=0.0)
    assert len(set(seen["read"])) == len(seen["read"]) == 12  # by a callback that one rank has
    assert len(set(seen["sums"])) == 1
    torch.testing.assert_close(seen["fds"], seen["trl"], rtol=1e-5, atol=0.0)
    assert len(seen["fds"]) == 6


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Return what both sides logged on two ranks: side -> name -> losses, norms, rates."""
    folder = tmp_path_factory.mktemp("sides")
    for side in ("fds", "deepspeed"):
        torchrun("tests.peers.hf_trainer", folder / side, side, ranks=2)
    return {side: json.loads((folder / side).read_text()) for side in ("fds", "deepspeed")}


@pytest.mark.parametrize("name", CASES)
def test_a_json_trains_what_their_trainer_trains_over_deepspeed_on_two_ranks(name, runs):
    # clipped in 16 bits, a weight that differs in its last bit of 32 is rounded to a neighbour now and then
    rtol = {"bf16": torch.finfo(torch.bfloat16).eps, "fp16": torch.finfo(torch.float16).eps}.get(name, 1e-5)
    ours, other = runs["fds"][name], runs["deepspeed"][name]
    torch.testing.assert_close(ours["rate"], other["rate"], rtol=1e-12, atol=0.0)
    torch.testing.assert_close(ours["loss"], other["loss"], rtol=rtol, atol=0.0)
    pairs = [pair for pair in zip(ours["norm"], other["norm"], strict=True) if pair[1] is not None]  # none at stage 0
    torch.testing.assert_close([a for a, _ in pairs], [b for _, b in pairs], rtol=rtol, atol=0.0)
    torch.testing.assert_close(ours["loss"][:3], other["loss"][:3], rtol=1e-7, atol=0.0)
    assert "16, stage" not in name or ours["loss"] == other["loss"]  # to the bit, from the first update to the last
    assert len(ours["loss"]) == UPDATES and ours["loss"][-1] < ours["loss"][0] - 0.5
