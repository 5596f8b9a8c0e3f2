"""A small BERT, GPT-2 and residual network, and what DeepSpeed 0.19.6 computes with them compressed.

compressed_modules.json, per case: `outputs` are what its model returns with its layers in the place of torch's, at the
first forward; `masks` what its masks by size keep. Weights, inputs and learned scores are sines, the same anywhere.

    DS_ACCELERATOR=cpu .venv-peers/bin/python tests/golden/compressed_modules.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

HERE = Path(__file__).parent
WORDS, WIDTH, HEADS, LAYERS = 24, 24, 4, 3


def numbers(*shape: int, start: int) -> Tensor:
    """Return numbers in (-0.5, 0.5) that differ."""
    count = torch.Size(shape).numel()
    return (torch.arange(start, start + count, dtype=torch.float64) * 12.9898).sin().mul(0.5).float().view(shape)


def filled(module: nn.Module) -> nn.Module:
    """Return the module with numbers as parameters."""
    start = 1
    with torch.no_grad():
        for p in module.parameters():
            p.copy_(numbers(*p.shape, start=start))
            start += p.numel()
    return module.eval()


class SelfAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for f in (self.query, self.key, self.value))
        weights = (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1)
        return (weights @ v).transpose(1, 2).flatten(2)


class Output(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.dense, self.LayerNorm = nn.Linear(width, WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor, before: Tensor) -> Tensor:
        return self.LayerNorm(self.dense(x) + before)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.self, self.output = SelfAttention(), Output(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.output(self.self(x), x)


class Intermediate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.nn.functional.gelu(self.dense(x))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.intermediate, self.output = Attention(), Intermediate(), Output(2 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.attention(x)
        return self.output(self.intermediate(x), x)


class Bert(nn.Module):
    """A model with the names of Hugging Face's, on which the regular expressions of its users are."""

    def __init__(self, layers: int = LAYERS) -> None:
        super().__init__()
        self.bert = nn.Module()
        self.bert.embeddings = nn.Module()
        self.bert.embeddings.word_embeddings = nn.Embedding(WORDS, WIDTH)
        self.bert.encoder = nn.Module()
        self.bert.encoder.layer = nn.ModuleList([Layer() for _ in range(layers)])
        self.bert.pooler = nn.Linear(WIDTH, WIDTH)
        self.classifier = nn.Linear(WIDTH, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.bert.embeddings.word_embeddings(tokens)
        for layer in self.bert.encoder.layer:
            x = layer(x)
        return self.classifier(torch.tanh(self.bert.pooler(x[:, 0])))


class Basic(nn.Module):
    """A block of a residual network."""

    def __init__(self, planes: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(planes, planes, 3, padding=1, bias=False), nn.BatchNorm2d(planes)
        self.conv2, self.bn2 = nn.Conv2d(planes, planes, 3, padding=1, bias=False), nn.BatchNorm2d(planes)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.bn2(self.conv2(torch.relu(self.bn1(self.conv1(x))))) + x)


class ResNet(nn.Module):
    """Two blocks between a convolution and a linear layer, named as torchvision names them."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.layer1, self.layer2 = nn.Sequential(Basic(8)), nn.Sequential(Basic(8))
        self.fc = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer2(self.layer1(torch.relu(self.bn1(self.conv1(x)))))
        return self.fc(x.mean((2, 3)))


class Conv1D(nn.Module):
    """A linear layer whose weight is (inputs, outputs), as transformers has it under this name."""

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.nf = nf
        self.weight, self.bias = nn.Parameter(torch.empty(nx, nf)), nn.Parameter(torch.zeros(nf))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight + self.bias


Conv1D.__module__ = "transformers.pytorch_utils"  # by which it is known


class GPT2(nn.Module):
    """A model with the names of Hugging Face's; of its head the weight is that of the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.transformer = nn.Module()
        self.transformer.wte = nn.Embedding(WORDS, WIDTH)
        self.transformer.h = nn.ModuleList([nn.Module() for _ in range(2)])
        for block in self.transformer.h:
            block.attn, block.mlp = nn.Module(), nn.Module()
            block.attn.c_attn, block.attn.c_proj = Conv1D(3 * WIDTH, WIDTH), Conv1D(WIDTH, WIDTH)
            block.mlp.c_fc, block.mlp.c_proj = Conv1D(4 * WIDTH, WIDTH), Conv1D(WIDTH, 4 * WIDTH)
        self.lm_head = nn.Linear(WIDTH, WORDS, bias=False)
        self.lm_head.weight = self.transformer.wte.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.transformer.wte(tokens)
        for block in self.transformer.h:
            q, k, v = block.attn.c_attn(x).chunk(3, -1)
            x = x + block.attn.c_proj(nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True))
            x = x + block.mlp.c_proj(nn.functional.gelu(block.mlp.c_fc(x)))
        return self.lm_head(x)


TOKENS = torch.arange(10).view(2, 5) * 7 % WORDS
IMAGES = numbers(2, 3, 6, 6, start=5)
ATTENTION, REST = ["attention.self", "attention.output.dense"], ["intermediate", r"layer.\w+.output.dense"]


def technique(key: str, groups: dict[str, tuple[dict[str, Any], list[str]]], **shared: Any) -> dict[str, Any]:
    """Return a section of `compression_training`: one technique, of groups, in force from the first step."""
    listed = {name: {"params": params, "modules": modules} for name, (params, modules) in groups.items()}
    return {key: {"shared_parameters": {"enabled": True, "schedule_offset": 0, **shared}, "different_groups": listed}}


def weights(bits: int, modules: list[str], groups: int = 1, kind: str = "symmetric", **more: Any) -> dict[str, Any]:
    of = {"start_bits": 8, "target_bits": bits, "quantization_period": 0}
    return technique(
        "weight_quantization",
        {"wq1": (of, modules)},
        quantize_groups=groups,
        quantization_type=kind,
        quantize_weight_in_forward=True,
        **more,
    )


def inputs(bits: int, modules: list[str], kind: str = "symmetric") -> dict[str, Any]:
    return technique("activation_quantization", {"aq1": ({"bits": bits}, modules)}, quantization_type=kind)


def pruned(
    key: str, share: float, modules: list[str], method: str = "l1", related: list[list[str]] | None = None, **more: Any
) -> dict[str, Any]:
    section = technique(key, {"p1": ({"dense_ratio": share}, modules)}, method=method, **more)
    if related is not None:
        section[key]["different_groups"]["p1"]["related_modules"] = related
    return section


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "8 bits": ("Bert", weights(8, [*ATTENTION, *REST])),
    "8 bits, groups": ("Bert", weights(8, ATTENTION, groups=4)),
    "4 bits, asymmetric groups": ("Bert", weights(4, REST, groups=8, kind="asymmetric")),
    "2 bits": ("Bert", weights(2, ["attention.self"], groups=2)),
    "1 bit": ("Bert", weights(1, ["attention.self", "intermediate", "word_embeddings", "output.dense"])),
    "embeddings": ("Bert", weights(4, ["word_embeddings"], groups=2)),
    "inputs of 8 bits": ("Bert", inputs(8, [*ATTENTION, *REST])),
    "inputs of 4 bits, asymmetric": ("Bert", inputs(4, REST, kind="asymmetric")),
    "weights and inputs": ("Bert", weights(8, ATTENTION, groups=4) | inputs(8, ATTENTION)),
    "convolutions": ("ResNet", weights(8, ["conv1"], groups=2) | inputs(8, ["conv2"])),
    "sparse": ("Bert", pruned("sparse_pruning", 0.5, ["attention.self"])),
    "sparse and of 4 bits": ("Bert", pruned("sparse_pruning", 0.3, REST) | weights(4, REST, groups=4)),
    "sparse convolutions": ("ResNet", pruned("sparse_pruning", 0.4, ["conv1", "conv2"])),
    "rows": ("Bert", pruned("row_pruning", 0.5, ["intermediate.dense"])),
    "sparse by scores": ("Bert", pruned("sparse_pruning", 0.5, ["attention.self"], "topk")),
    "rows by scores": ("Bert", pruned("row_pruning", 0.5, ["intermediate.dense"], "topk")),
    "heads by scores": ("Bert", pruned("head_pruning", 0.5, ["attention.output.dense"], "topk", num_heads=HEADS)),
    "channels by scores": ("ResNet", pruned("channel_pruning", 0.5, ["layer....conv1"], "topk")),
}
MODELS = {"Bert": (Bert, TOKENS), "ResNet": (ResNet, IMAGES), "GPT2": (GPT2, TOKENS)}
_MASKS = ("sparse_pruning_mask", "row_pruning_mask", "channel_pruning_mask")


def recorded() -> dict[str, dict[str, Any]]:
    """Return what fds is compared with."""
    return json.loads((HERE / "compressed_modules.json").read_text())


def main() -> None:
    """Ask DeepSpeed, and write the file."""
    from deepspeed.compression.compress import init_compression

    out: dict[str, Any] = {}
    for name, (kind, section) in CASES.items():
        make, given = MODELS[kind]
        config = {"compression_training": json.loads(json.dumps(section))}
        model = init_compression(filled(make()), config)
        for module in model.modules():  # by hand: its scheduler raises a KeyError for sparse pruning by size
            for key in [
                key.removesuffix("_method") for key, value in vars(module).items() if key.endswith("_method") and value
            ]:
                setattr(module, f"{key}_enabled", True)
            module.weight_quantization_enabled = True
        for name_of, p in model.named_parameters():
            if "score" in name_of:
                p.data.copy_(numbers(*p.shape, start=7))
        with torch.no_grad():
            values = model.eval()(given).tolist()
        masks = {
            f"{path}.weight": buffer.flatten().int().tolist()
            for path, module in model.named_modules()
            for key, buffer in module.named_buffers(recurse=False)
            if key in _MASKS
        }
        out[name] = {"outputs": values, "masks": masks}
    (HERE / "compressed_modules.json").write_text(json.dumps(out) + "\n")


if __name__ == "__main__":
    main()
