"""A rank of transformers' Trainer, over DeepSpeed or over a step of fds: train, and write down what it logged.

python -m torch.distributed.run --standalone --nproc-per-node 2 -m tests.peers.hf_trainer OUT SIDE NAME ...

With the side "stopped": train over fds at stage 3, and go on from a checkpoint at stage 3 and at stage 1; and train
TRL's trainer with and without fds.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from tests.peers.trainer import JSON, model, padded, rows, settings

UPDATES = 30
BATCHES = dict.fromkeys(("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"), "auto")
BARE = {**BATCHES, "gradient_clipping": "auto"}


def in_16_bits(key: str, stage: int) -> dict[str, Any]:
    """Return a JSON in bfloat16 or float16."""
    scale = {"initial_scale_power": 8} if key == "fp16" else {}
    return {**BARE, key: {"enabled": "auto", **scale}, "zero_optimization": {"stage": stage}}


CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # name -> JSON, arguments
    **{f"stage {n}": ({**BARE, "zero_optimization": {"stage": n}}, {"weight_decay": 0.1}) for n in range(4)},
    "their optimizer": ({**JSON, "zero_optimization": {"stage": 2}}, {}),
    "their schedule": (
        {**{key: JSON[key] for key in JSON if key != "scheduler"}, "zero_optimization": {"stage": 1}},
        {"lr_scheduler_type": "cosine"},
    ),
    "bf16": (in_16_bits("bf16", 2), {"bf16": True}),
    "fp16": (in_16_bits("fp16", 2), {"fp16": True}),
    # without the clip, by which the two divide in another order
    "bf16, stage 1": (in_16_bits("bf16", 1), {"bf16": True, "max_grad_norm": 0.0}),
    "bf16, stage 3": (in_16_bits("bf16", 3), {"bf16": True, "max_grad_norm": 0.0, "weight_decay": 0.1}),
    "fp16, stage 2": (in_16_bits("fp16", 2), {"fp16": True, "max_grad_norm": 0.0}),
    "fp16, stage 3": (in_16_bits("fp16", 3), {"fp16": True, "max_grad_norm": 0.0}),
}


def main(out: str, side: str, *names: str) -> None:
    import transformers  # pyright: ignore[reportMissingImports]

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    if side == "stopped":
        with mock.patch("builtins.print"):
            seen = stopped(transformers, out)
        if torch.distributed.get_rank() == 0:
            Path(out).write_text(json.dumps(seen))
        torch.distributed.barrier()
        return
    runs = {}
    for name in names or CASES:
        config, more = CASES[name]
        given = settings(**{**more, "max_steps": UPDATES})
        theirs = {} if side == "fds" else {"deepspeed": config}
        arguments = transformers.TrainingArguments(
            **given,
            **theirs,
            output_dir=f"{out}-trainer",
            use_cpu=True,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            logging_steps=1,
            dataloader_pin_memory=False,
        )
        with mock.patch("builtins.print"):
            runs[name] = trained(transformers, side, arguments, config)
        if arguments.process_index == 0:
            Path(out).write_text(json.dumps(runs))
    torch.distributed.barrier()


def trained(transformers: Any, side: str, arguments: Any, config: Any) -> dict[str, list[float]]:
    """Return losses, norms and rates of all updates."""
    seen: dict[str, list[float]] = {"rate": []}

    class Rates(transformers.TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **keywords: Any) -> None:
            seen["rate"].append(float(keywords["optimizer"].param_groups[0]["lr"]))  # of the update that begins

    data, train = rows(arguments.world_size), {"data_collator": padded}
    if side == "fds":
        import fds

        trainer = fds.hf.Trainer(model(), arguments, train_dataset=data, config=config, **train)
    else:
        trainer = transformers.Trainer(model(), arguments, train_dataset=data, callbacks=[Rates()], **train)
    trainer.train()
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    rates = seen["rate"] or [entry["learning_rate"] for entry in logged]
    return {"loss": [e["loss"] for e in logged], "norm": [e.get("grad_norm") for e in logged], "rate": rates}


def stopped(transformers: Any, out: str) -> dict[str, Any]:
    """Return losses after the checkpoint of three runs, what a callback of the first rank read, and two norms."""
    import fds

    read: list[float] = []

    class Reads(transformers.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
            read.append(float(model.lm_head.weight.detach().double().sum()))

    def run(folder: str, stage: int, resume: str | None = None) -> Any:
        arguments = transformers.TrainingArguments(
            folder,
            **settings(max_steps=12, weight_decay=0.1),
            use_cpu=True,
            report_to=[],
            disable_tqdm=True,
            dataloader_pin_memory=False,
            logging_steps=1,
            save_steps=4,
            eval_strategy="steps",
            eval_steps=4,
            save_total_limit=2,
            load_best_model_at_end=True,
        )
        trainer = fds.hf.Trainer(
            model(),
            arguments,
            train_dataset=rows(2)[:88],
            eval_dataset=rows(2)[88:118],
            data_collator=padded,
            config={"gradient_clipping": "auto", "zero_optimization": {"stage": stage}},
            callbacks=[Reads()] if arguments.process_index == 0 and resume is None else [],
        )
        trainer.train(resume_from_checkpoint=resume)
        return trainer

    def late(trainer: Any) -> list[float]:
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry and entry["step"] > 8]

    whole = run(f"{out}-whole", 3)
    if torch.distributed.get_rank() == 0:
        whole.save_model(f"{out}-saved")  # one rank alone
    torch.distributed.barrier()
    last = f"{out}-whole/checkpoint-8"
    again, other = run(f"{out}-again", 3, last), run(f"{out}-other", 1, last)
    saved = transformers.AutoModelForCausalLM.from_pretrained(f"{out}-saved")
    sums = [float(x.lm_head.weight.detach().double().sum()) for x in (saved, whole.model, again.model)]
    sft = {name: rows_of_trl(name, out) for name in ("fds", "trl")}
    return {"whole": late(whole), "again": late(again), "other": late(other), "read": read, "sums": sums, **sft}


def rows_of_trl(side: str, out: str) -> list[list[float]]:
    """Return the losses and norms of TRL's trainer on packed rows, over fds at stage 3 or as it is."""
    import datasets
    import trl
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    import fds

    class Ours(fds.hf.Trainer, trl.SFTTrainer):
        pass

    words = Tokenizer(models.WordLevel({str(i): i for i in range(31)}, unk_token="0"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="0", eos_token="1", unk_token="0")
    datasets.disable_progress_bars()
    data = datasets.Dataset.from_list([{"input_ids": row} for row in rows(2)[:88]])
    given = {key: value for key, value in settings(max_steps=6).items() if key != "warmup_steps"}
    shown = {"use_cpu": True, "report_to": [], "disable_tqdm": True, "logging_steps": 1}
    more = {"bf16": False, "save_strategy": "no", "dataloader_pin_memory": False, "packing": True, "max_length": 16}
    arguments = trl.SFTConfig(output_dir=f"{out}-{side}", **given, **shown, **more)
    ours = {"config": {"gradient_clipping": "auto", "zero_optimization": {"stage": 3}}} if side == "fds" else {}
    kind = Ours if side == "fds" else trl.SFTTrainer
    made = kind(model(), arguments, train_dataset=data, processing_class=tokenizer, **ours)
    made.train()
    return [[entry["loss"], entry["grad_norm"]] for entry in made.state.log_history if "loss" in entry]


if __name__ == "__main__":
    torch.set_num_threads(1)
    from deepspeed.accelerator import get_accelerator  # pyright: ignore[reportMissingImports]

    # gloo carries all: its own operator for ranks of one machine is compiled first, and waits by spinning; and its
    # float16 runs on a CPU, though DeepSpeed does not say so
    with (
        mock.patch("deepspeed.comm.torch.build_shm_op", return_value=None),
        mock.patch.object(get_accelerator(), "is_fp16_supported", return_value=True),
    ):
        main(*sys.argv[1:])
