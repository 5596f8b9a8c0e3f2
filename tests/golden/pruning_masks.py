"""Record the masks that DeepSpeed 0.19.6 makes of weights and of scores, and what its pruned modules return.

    DS_ACCELERATOR=cpu PYTHONPATH=... .venv-peers/bin/python tests/golden/pruning_masks.py

with neural_compressor 2.6 and what it imports (schema, pandas, scikit-learn, ...) in the path.

Each case of pruning_masks.json is a module of `torch.nn` with one way of pruning by its `enable_*_pruning`: its
parameters and input, drawn from a seed and rounded to float32, the mask, and the sum of its outputs with their squares.
Weights have no two equal magnitudes. A convolution's channels by l1 are not among the cases: 0.19.6 asks
`torch.linalg.norm` for a norm over three dims, which raises.
A training is one of TRAININGS by `init_compression`, the scheduler and `redundancy_clean`: its losses, and what the
cleaned model returns for one more batch, and the shapes of its parameters.
`sums` are trainings by "snip_momentum", of one weight or of two, whose blocks neural_compressor 2.6 compares with one
another: after each call the loss, and the masks. 0.19.6 imports modules `nc` and `nc_pruner`, which are not
there: here they are those of neural_compressor that it means. That looks for a last layer among classes called Linear,
which DeepSpeed has replaced: here its class has that name.
"""

import copy
import json
import sys
from pathlib import Path

import torch

HERE = Path(__file__).parent
CASES = [
    ("sparse", "l1", 0.5),
    ("sparse", "l1", 0.1),
    ("sparse", "topk", 0.3),
    ("row", "l1", 0.5),
    ("row", "topk", 0.7),
    ("head", "topk", 0.5),
    ("head", "topk", 0.25),
    ("channel", "topk", 0.5),
    ("conv", "l1", 0.4),
]
ROWS, COLUMNS, HEADS = 12, 16, 4


def made(index, kind):
    """Return the shapes' tensors of a case: weight, bias, scores and input."""
    g = torch.Generator().manual_seed(index)
    shape = (6, 3, 2, 2) if kind in ("channel", "conv") else (ROWS, COLUMNS)
    scores = {"sparse": shape, "row": (ROWS, 1), "head": (1, HEADS), "channel": (6, 1, 1, 1), "conv": shape}[kind]
    batch = (2, 3, 5, 5) if len(shape) == 4 else (3, COLUMNS)
    return [torch.randn(size, generator=g) for size in (shape, shape[:1], scores, batch)]


def case(index, kind, method, density):
    """Return what DeepSpeed makes of a case."""
    from deepspeed.compression.basic_layer import Conv2dLayer_Compress, LinearLayer_Compress  # pyright: ignore[reportMissingImports]

    weight, bias, scores, x = made(index, kind)
    is_conv = weight.dim() == 4
    module = Conv2dLayer_Compress(3, 6, 2) if is_conv else LinearLayer_Compress(COLUMNS, ROWS)
    module.weight.data, module.bias.data = weight.clone(), bias.clone()
    name = "sparse" if kind == "conv" else kind
    more = (HEADS,) if kind == "head" else ()
    getattr(module, f"enable_{name}_pruning")(density, method, *more)
    if method == "topk":
        parameter = "head_pruning_scores" if kind == "head" else f"{name}_mask_scores"
        getattr(module, parameter).data = scores.clone()
    setattr(module, f"{name}_pruning_enabled", True)
    mask = module.get_mask(name).detach()
    out = module(x)
    out.square().sum().backward()
    gradient = module.weight.grad
    by_scores = None
    if method == "topk":
        by_scores = getattr(module, parameter).grad.flatten().tolist()
    return {
        "kind": kind,
        "method": method,
        "density": density,
        "mask": "".join(str(int(m)) for m in mask.flatten()),
        "squares": out.square().sum().item(),
        "gradient": gradient.square().sum().item(),
        "of_scores": by_scores,
    }


TRAININGS = {  # of each: kind -> (modules, related modules, method, density, offset, more)
    "l1": {"row_pruning": ("fc1", [["fc2"]], "l1", 0.4, 2, {}), "sparse_pruning": ("head", [], "l1", 0.3, 1, {})},
    "topk": {
        "row_pruning": ("fc1", [["fc2"]], "topk", 0.5, 1, {}),
        "head_pruning": ("head", [], "topk", 0.5, 3, {"num_heads": HEADS}),
        "sparse_pruning": ("fc2", [], "topk", 0.6, 0, {}),
    },
}
CALLS, LR = 6, 0.1


class Net(torch.nn.Module):
    """Three linear layers, of which the first two are followed by an activation that keeps 0."""

    def __init__(self):
        super().__init__()
        self.fc1, self.fc2, self.head = torch.nn.Linear(6, 16), torch.nn.Linear(16, 8), torch.nn.Linear(8, 3)

    def forward(self, x):
        return self.head(torch.relu(self.fc2(torch.relu(self.fc1(x)))))


def drawn(name, shape):
    """Return a parameter of a training, the same whoever asks."""
    g = torch.Generator().manual_seed(sum(map(ord, name)))
    return torch.randn(shape, generator=g) / shape[-1] ** 0.5


def rows(call):
    """Return the batch of a call."""
    g = torch.Generator().manual_seed(call)
    return torch.randn(5, 6, generator=g), torch.randn(5, 3, generator=g)


def training(name):
    """Return the losses of a training in DeepSpeed, and what the cleaned model returns and has."""
    from deepspeed.compression.compress import init_compression, redundancy_clean  # pyright: ignore[reportMissingImports]
    from deepspeed.compression.config import get_compression_config  # pyright: ignore[reportMissingImports]
    from deepspeed.compression.scheduler import compression_scheduler  # pyright: ignore[reportMissingImports]

    kinds = {}
    for kind, (module, related, method, density, offset, more) in TRAININGS[name].items():
        shared = {"enabled": True, "schedule_offset": offset, "method": method, **more}
        group = {"params": {"dense_ratio": density}, "modules": [module]}
        kinds[kind] = {
            "shared_parameters": shared,
            "different_groups": {"group": group | ({"related_modules": related} if related else {})},
        }
    config = {"compression_training": kinds, "train_batch_size": 1}
    model = init_compression(Net(), config)
    for path, p in model.named_parameters():
        p.data = drawn(path.replace("mask_scores", "scores").replace("pruning_scores", "scores"), p.shape)
    for module in model.modules():  # whose masks are of the weights that it had before
        for kind in ("sparse", "row"):
            if getattr(module, f"{kind}_pruning_method", None) == "l1":
                density = getattr(module, f"{kind}_pruning_ratio")
                getattr(module, f"enable_{kind}_pruning")(density, "l1")
    known = get_compression_config(config)
    known["sparse_pruning"]["shared_parameters"]["schedule_offset_end"] = CALLS  # which 0.19.6 reads and never writes
    scheduler = compression_scheduler(model, known)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    scheduler.step(step_zero_check=True)
    losses = []
    for call in range(CALLS):
        x, y = rows(call)
        optimizer.zero_grad()
        loss = (model(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
    clean = redundancy_clean(model, config)
    shapes = {path: list(p.shape) for path, p in clean.named_parameters()}
    return {"name": name, "losses": losses, "outputs": clean(rows(99)[0]).flatten().tolist(), "shapes": shapes}


SUMS = [  # shared parameters of sparse pruning, and the layers that are pruned; a last one stays as it is
    ("fc2", {"dense_ratio": 0.3, "schedule_offset": 1, "schedule_offset_end": 8, "schedule_offset_stride": 3}),
    ("fc2", {"dense_ratio": 0.4, "schedule_offset": 2, "schedule_offset_end": 6, "schedule_offset_stride": 2}),
    ("fc1", {"dense_ratio": 0.25, "schedule_offset": 3, "block_pattern": "2x2"}),
    ("fc1", {"dense_ratio": 0.01, "schedule_offset": 1, "schedule_offset_end": 2, "block_pattern": "1x1"}),
    ("fc1 fc2", {"dense_ratio": 0.2, "schedule_offset": 1, "schedule_offset_end": 8, "schedule_offset_stride": 2}),
    ("fc1 fc2", {"dense_ratio": 0.01, "schedule_offset": 1, "schedule_offset_end": 5, "block_pattern": "1x1"}),
]


def sums(layers, shared):
    """Return the losses, and the masks of weights, of a training by sums of weight times gradient."""
    import neural_compressor as nc  # pyright: ignore[reportMissingImports]
    from deepspeed.compression import basic_layer, helper  # pyright: ignore[reportMissingImports]
    from deepspeed.compression.compress import init_compression  # pyright: ignore[reportMissingImports]
    from neural_compressor.compression import pruner  # pyright: ignore[reportMissingImports]
    from neural_compressor.compression.pruner import pruners, utils  # pyright: ignore[reportMissingImports]

    sys.modules |= {"nc": nc, "nc_pruner": pruner, "nc_pruner.utils": utils, "nc_pruner.pruners": pruners}
    basic_layer.LinearLayer_Compress.__name__ = "Linear"
    made = nc.WeightPruningConfig.__init__
    made.__defaults__ = ([{}], *made.__defaults__[1:])  # of which the first call keeps what it was given
    excluded = [word for word, layer in (("f.1", "fc1"), ("fc2", "fc2")) if layer not in layers]
    asked = {"enabled": True, "method": "snip_momentum", "excluded_modules": excluded, **shared}
    section = {"shared_parameters": asked, "different_groups": {}}
    model = init_compression(Net(), {"compression_training": {"sparse_pruning": copy.deepcopy(section)}})
    for path, p in model.named_parameters():
        p.data = drawn(path, p.shape)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    optimizer.pruners = model.pruners
    helper.rewrite_optimizer_step(optimizer)
    losses, stays = [], []
    for call in range(10):
        x, y = rows(call)
        optimizer.zero_grad()
        loss = (model(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        made = model.pruners[0].masks.values()
        stays.append(" ".join("".join(str(int(m)) for m in mask.flatten()) for mask in made))
    weights = [f"{layer}.weight" for layer in layers.split()]
    return {"section": section, "weights": weights, "losses": losses, "masks": stays}


def main():
    """Write the file."""
    import deepspeed  # pyright: ignore[reportMissingImports]

    cases = [case(index, *one) for index, one in enumerate(CASES)]
    versions = {"deepspeed": deepspeed.__version__, "torch": torch.__version__}
    lines = ",\n".join(json.dumps(one) for one in cases)
    trainings = ",\n".join(json.dumps(training(name)) for name in TRAININGS)
    by_sums = ",\n".join(json.dumps(sums(*one)) for one in SUMS)
    parts = {"cases": lines, "trainings": trainings, "sums": by_sums}
    text = ", ".join(f'"{name}": [\n{part}\n]' for name, part in parts.items())
    text = f'{{"versions": {json.dumps(versions)}, {text}}}\n'
    (HERE / "pruning_masks.json").write_text(text)


if __name__ == "__main__":
    main()
