"""A rank of transformers' Trainer over DeepSpeed: train, and write down the losses and norms of its updates.

python -m torch.distributed.run --standalone --nproc-per-node 2 -m tests.peers.trainer OUT
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import torch

UPDATES, ROWS, MICROBATCHES = 12, 4, 2  # rows of a microbatch on a rank, microbatches of an update
JSON = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "optimizer": {
        "type": "AdamW",
        "params": {**dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto"), "torch_adam": True},
    },
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": dict.fromkeys(("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps"), "auto"),
    },
    "zero_optimization": {"stage": 2},
}


def model() -> Any:
    """Return a small causal model without dropout, the same on every call."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=31, **sizes)).train()


def rows(ranks: int) -> list[list[int]]:
    """Return the rows of all updates, which count on from any token for two to seventeen tokens."""
    draw = torch.Generator().manual_seed(1)
    lengths = torch.randint(2, 18, (UPDATES * ROWS * MICROBATCHES * ranks,), generator=draw).tolist()
    starts = torch.randint(31, (len(lengths),), generator=draw).tolist()
    return [[(start + i) % 31 for i in range(n)] for start, n in zip(starts, lengths, strict=True)]


def padded(some: list[list[int]]) -> dict[str, torch.Tensor]:
    """Return rows as a batch, padded to the longest of them, whose padding counts in no loss."""
    fill = lambda value, of: torch.tensor([of(row) + [value] * (max(map(len, some)) - len(row)) for row in some])
    same = lambda row: row
    return {
        "input_ids": fill(0, same),
        "attention_mask": fill(0, lambda row: [1] * len(row)),
        "labels": fill(-100, same),
    }


def settings(**more: Any) -> dict[str, Any]:
    """Return the arguments of the training, as `TrainingArguments` take them."""
    return {
        "per_device_train_batch_size": ROWS,
        "gradient_accumulation_steps": MICROBATCHES,
        "learning_rate": 1e-2,
        "adam_epsilon": 1e-3,  # small gradients differ by their rounding, by which Adam would divide them
        "max_grad_norm": 0.7,
        "warmup_steps": 3,
        "max_steps": UPDATES,
        **more,
    }


def main(out: str) -> None:
    import transformers

    class Recorded(transformers.Trainer):
        losses, norms = [0.0], list[float]()

        def _get_train_sampler(self, *_: Any) -> Any:
            return torch.utils.data.SequentialSampler(self.train_dataset)

        def training_step(self, *arguments: Any, **keywords: Any) -> Any:
            loss = super().training_step(*arguments, **keywords)
            self.losses[-1] += self.accelerator.gather(loss).double().mean().item()
            return loss

        def _get_grad_norm(self, *arguments: Any, **keywords: Any) -> Any:
            norm = super()._get_grad_norm(*arguments, **keywords)
            self.norms.append(float(norm))
            self.losses.append(0.0)
            return norm

    # gloo carries all: its own operator for ranks of one machine is compiled first, and waits by spinning
    with mock.patch("deepspeed.comm.torch.build_shm_op", return_value=None):
        arguments = transformers.TrainingArguments(
            **settings(
                output_dir=f"{out}-trainer",
                deepspeed=JSON,
                use_cpu=True,
                report_to=[],
                save_strategy="no",
                disable_tqdm=True,
            )
        )
        trainer = Recorded(model(), arguments, train_dataset=rows(arguments.world_size), data_collator=padded)
        trainer.train()
    if arguments.process_index == 0:
        Path(out).write_text(json.dumps({"losses": trainer.losses[:-1], "norms": trainer.norms}))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(*sys.argv[1:])
