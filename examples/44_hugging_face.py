"""A model of transformers from its files into the slices of two ranks, trained, and back into files.

`from_pretrained` holds a whole model on every rank. Here each rank reads the bytes that it will hold, and no others.
What training leaves is written by both ranks as a folder that `from_pretrained` loads: the values are equal to the last
bit. It needs transformers: pip install 'fds[hf]'.
"""

import importlib
import inspect
import tempfile
import textwrap
from pathlib import Path

import torch
import torch.nn.functional as F

import fds

transformers = importlib.import_module("transformers")
torch.set_num_threads(1)  # a model this small is fastest on one
text = torch.tensor(list(inspect.getsource(textwrap).encode()))
windows = text.unfold(0, 33, 1)

folder = Path(tempfile.mkdtemp())
config = transformers.LlamaConfig(
    vocab_size=256,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    tie_word_embeddings=True,
    bos_token_id=1,
    eos_token_id=2,
)
torch.manual_seed(0)
transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder / "base", max_shard_size="100KB")

model = fds.hf.lazy(folder / "base")  # configuration, names and shapes
apply = model.apply
assert all(p.is_meta for p in model.module.parameters())


def batch(i, rows=32):
    at = torch.randint(len(windows), (rows,), generator=torch.Generator().manual_seed(i))
    return windows[at]


def loss_fn(params, tokens):
    logits = apply(params, input_ids=tokens[:, :-1]).logits
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def on_ranks():
    axis = fds.mesh(dp=-1)["dp"]
    step = fds.compose(fds.shard_optimizer(axis, stage=3), fds.clip_by_global_norm(1.0), fds.adamw(3e-3))(loss_fn)
    state = fds.hf.init(step, model, key=0)  # every rank, its own ranges of bytes
    held = sum(x.nbytes for x in fds.tree.leaves(state.params))
    losses = []
    for i in range(30):
        state, metrics = step(state, batch(i).chunk(axis.size)[axis.index])
        losses.append(float(metrics["loss"]))
    fds.hf.save(state, step, folder / "tuned", source=model)  # every rank, what it holds
    return losses, held, step.params(state)


(losses, held, params), (_, other, _) = fds.simulate(on_ranks, 2)
in_files = sum(path.stat().st_size for path in (folder / "base").glob("*.safetensors"))
print(f"{in_files:,} bytes in files; held by the ranks: {held:,} and {other:,}")
print(f"loss {losses[0]:.2f}, after 30 updates {losses[-1]:.2f}")
assert held == other < 0.6 * in_files and losses[-1] < 0.8 * losses[0]

again = transformers.AutoModelForCausalLM.from_pretrained(folder / "tuned")
apart = max(float((p.detach() - params[name]).abs().max()) for name, p in again.named_parameters())
print(f"what from_pretrained loads differs by {apart}")
assert apart == 0
assert again.lm_head.weight is again.model.embed_tokens.weight  # one parameter, read once and written once
