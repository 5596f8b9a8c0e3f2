"""A script in the manner of transformers' run_clm.py, of a model that is as small as can be, for `fds tune`."""

import argparse
import json
from pathlib import Path

import torch

import fds
from fds.config import training_arguments


def main():
    from transformers import GPT2Config, GPT2LMHeadModel  # here: tests are imported without it

    parser = argparse.ArgumentParser()
    parser.add_argument("--deepspeed")
    parser.add_argument("--per_device_train_batch_size", type=int, default=1)
    parser.add_argument("--gradient_accumulation_steps", type=int, default=1)
    parser.add_argument("--learning_rate", type=float, default=2e-5)
    parser.add_argument("--adam_epsilon", type=float, default=1e-8)
    parser.add_argument("--weight_decay", type=float, default=0.0)
    parser.add_argument("--max_grad_norm", type=float, default=1.0)
    parser.add_argument("--warmup_steps", type=int, default=10)
    parser.add_argument("--max_steps", type=int, default=200)
    parser.add_argument("--fp16", action="store_true")
    options = parser.parse_args()
    options.adam_beta1, options.adam_beta2, options.bf16 = 0.9, 0.999, False
    model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=16, n_embd=16, n_layer=1, n_head=2))
    tokens = torch.randint(0, 64, (64, 8))
    rows = [{"input_ids": row, "labels": row} for row in tokens]
    has_optimizer = "optimizer" in json.loads(Path(options.deepspeed).read_text())
    step, state, loader, _ = fds.initialize(
        model,
        config=options.deepspeed,
        auto=training_arguments(options, hidden_size=16),
        optimizer=None if has_optimizer else fds.adamw,
        schedule=None if has_optimizer else fds.schedules.constant(options.learning_rate),
        training_data=rows,
        unknown="warn",
    )
    for _ in range(options.max_steps):
        for batch in loader:
            state, _ = step(state, batch)


if __name__ == "__main__":
    main()
