"""transformers' Trainer around a step: its loop, arguments and checkpoints stay, an update is one call of the step.

First the arguments say what the step is, then a composition does, with Lion and an average of the weights that no
argument names. A run that is begun again from a checkpoint has the bits of the run that was not stopped. It needs
transformers: pip install 'fds[hf]'.
"""

import importlib
import inspect
import tempfile
import textwrap

import torch

import fds

transformers = importlib.import_module("transformers")
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
torch.set_num_threads(1)  # a model this small is fastest on one
text = torch.tensor(list(inspect.getsource(textwrap).encode()))
rows = [{"input_ids": window, "labels": window} for window in text.unfold(0, 32, 16)]
folder = tempfile.mkdtemp()


def train(name, step=None, resume=None, **more):
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig(vocab_size=256, **sizes))
    arguments = transformers.TrainingArguments(
        f"{folder}/{name}",
        per_device_train_batch_size=8,
        gradient_accumulation_steps=2,
        max_steps=30,
        save_steps=20,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        dataloader_pin_memory=False,
        **more,
    )
    trainer = fds.hf.Trainer(model, arguments, step=step, train_dataset=rows)
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


translated = train("translated", learning_rate=1e-2, warmup_steps=3, weight_decay=0.01)
print(f"the arguments' step  loss {translated.step_metrics['loss']:.3f}")

rate = fds.schedules.warmup_decay(3e-3, warmup_steps=3, total_steps=30)
composed = fds.compose(fds.ema(0.9), fds.clip_by_global_norm(1.0), fds.lion(rate))
whole = train("composed", composed)
print(f"Lion, and an average loss {whole.step_metrics['loss']:.3f}")

again = train("again", composed, resume=f"{folder}/composed/checkpoint-20")
pairs = zip(fds.tree.leaves(whole.step_state), fds.tree.leaves(again.step_state), strict=True)
print("stopped at 20, and gone on with: the same bits", all(torch.equal(x, y) for x, y in pairs))
