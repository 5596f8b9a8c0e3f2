"""Rows over two ranks, and feed-forward layers in tiles: a Llama of transformers reads documents that share long rows.

Each rank takes a part of every row; attention sees the tokens of a document, whichever rank has them; a tile of tokens
is in a feed-forward layer at a time, and a chunk of logits in the head. The losses are those of one rank that has whole
rows. It needs transformers: pip install 'fds[hf]'.
"""

import importlib
import inspect
import textwrap

import torch

import fds

transformers = importlib.import_module("transformers")
transformers.logging.set_verbosity_error()
torch.set_num_threads(1)  # a model this small is fastest on one
torch.manual_seed(0)
sizes = {"hidden_size": 32, "intermediate_size": 128, "num_hidden_layers": 2}
config = transformers.LlamaConfig(vocab_size=256, num_attention_heads=4, num_key_value_heads=2, **sizes)
model = transformers.AutoModelForCausalLM.from_config(config).train()
model.activation_checkpointing_enable({"use_reentrant": False})  # a layer keeps what it is given alone

functions = [textwrap.wrap, textwrap.fill, textwrap.shorten, textwrap.dedent, textwrap.indent]
documents = [torch.tensor(list(inspect.getsource(f).encode())) for f in functions]
packed = fds.data.packed([piece for d in documents for piece in d.split(400)], 512)
rows = {
    "input_ids": torch.stack([row["tokens"] for row in packed]),
    "documents": torch.stack([row["documents"] for row in packed]),
}
print(f"{len(rows['input_ids'])} rows of 512 tokens")


def train(size):
    axis = fds.mesh(sp=size)["sp"]
    apply, params, _ = fds.functional(fds.hf.context_parallel(model, axis, chunk_tokens=128))
    step = fds.compose(
        fds.shard_optimizer(axis, stage=3),  # slices of the state over the same ranks
        fds.context_parallel(axis),
        fds.tile("model.layers.*.mlp", tokens=256),
        fds.adamw(1e-2),
    )(lambda params, part: apply(params, **part))
    state = step.init(params)
    part = fds.hf.part(rows, axis)
    losses = []
    for _ in range(4):
        state, metrics = step(state, part)
        losses.append(float(metrics["loss"]))
    return part["input_ids"].shape[1], losses


for size in (1, 2):
    tokens, losses = fds.simulate(lambda size=size: train(size), size)[-1]
    print(f"{size} ranks of {tokens} tokens", *(f"{x:.4f}" for x in losses))
