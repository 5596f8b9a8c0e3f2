"""Record what Hugging Face's BertLayer computes: its output and the gradient of everything, in float64.

    .venv-peers/bin/python tests/golden/bert_layer.py

Weights and inputs are formulas, kept nowhere: `numbers`. bert_layer.json, per case: the sizes; `masked`, whether the
last tokens of the second sequence are masked out by Hugging Face's additive mask; `out`; and the gradients of
sum(out * numbers) for the input ("hidden_states") and for each weight, flat, under Hugging Face's names. Floats are
written by `repr`, so reading them gives the same bits.
"""

import json
from pathlib import Path

import torch
from torch import Tensor

HERE = Path(__file__).parent
SIZES = [  # hidden size, heads, intermediate size, sequences, tokens, masked
    (12, 3, 20, 2, 5, False),
    (12, 3, 20, 2, 5, True),
    (10, 1, 7, 2, 8, True),
    (6, 2, 24, 2, 1, False),
]
EPS = 1e-12


def numbers(*shape: int, salt: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Return numbers that look random, in [-1, 1]; `salt` says which."""
    count = torch.Size(shape).numel()
    at = torch.arange(1, count + 1, dtype=torch.float64)
    return torch.sin(at * at * 0.7310 + at * 1.9137 + 12.9898 * salt).view(shape).to(dtype)


def shapes(h: int, i: int) -> dict[str, tuple[int, ...]]:
    """Return Hugging Face's names and shapes."""
    linear = {f"attention.self.{name}": (h, h) for name in ("query", "key", "value")}
    linear |= {"attention.output.dense": (h, h), "intermediate.dense": (i, h), "output.dense": (h, i)}
    found = {}
    for name, shape in linear.items():
        found |= {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
    for name in ("attention.output.LayerNorm", "output.LayerNorm"):
        found |= {f"{name}.weight": (h,), f"{name}.bias": (h,)}
    return found


def weights(h: int, i: int, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """Return weights under which every part of a layer matters."""
    made = {}
    for salt, (name, shape) in enumerate(shapes(h, i).items()):
        x = numbers(*shape, salt=salt)
        if len(shape) == 2:
            x = x * 2 * shape[1] ** -0.5
        elif name.endswith("LayerNorm.weight"):
            x = 1 + x / 2
        made[name] = x.to(dtype)
    return made


def mask(batch: int, tokens: int) -> Tensor:
    """Return (B, S) bool: all but the last third of the second sequence."""
    real = torch.ones(batch, tokens, dtype=torch.bool)
    real[1, tokens - tokens // 3 :] = False
    return real


def extended(real: Tensor, dtype: torch.dtype) -> Tensor:
    """Return Hugging Face's additive mask (B, 1, 1, S)."""
    return (~real[:, None, None, :]).to(dtype) * torch.finfo(dtype).min


def build(h: int, heads: int, i: int):
    """Return Hugging Face's layer, on its plain attention, without dropout."""
    from transformers import BertConfig  # pyright: ignore[reportMissingImports]
    from transformers.models.bert.modeling_bert import BertLayer  # pyright: ignore[reportMissingImports]

    config = BertConfig(
        hidden_size=h,
        num_attention_heads=heads,
        intermediate_size=i,
        hidden_act="gelu",
        layer_norm_eps=EPS,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    config._attn_implementation = "eager"
    return BertLayer(config)


def run(h: int, heads: int, i: int, batch: int, tokens: int, masked: bool, dtype: torch.dtype = torch.float64):
    """Return the output, and the gradients by name."""
    layer = build(h, heads, i).to(dtype)
    layer.load_state_dict(weights(h, i, dtype))
    x = numbers(batch, tokens, h, salt=100, dtype=dtype).requires_grad_()
    out = layer(x, extended(mask(batch, tokens), dtype) if masked else None)
    out = out[0] if isinstance(out, tuple) else out
    (out * numbers(*out.shape, salt=101, dtype=dtype)).sum().backward()
    return out.detach(), {"hidden_states": x.grad} | {name: p.grad for name, p in layer.named_parameters()}


def cases() -> list[dict]:
    """Return what is kept."""
    found = []
    for sizes in SIZES:
        out, gradients = run(*sizes)
        names = ("hidden_size", "heads", "intermediate_size", "batch", "tokens", "masked")
        flat = {name: x.flatten().tolist() for name, x in gradients.items()}
        found.append(dict(zip(names, sizes, strict=True)) | {"out": out.flatten().tolist(), "gradients": flat})
    return found


def main() -> None:
    """Write the file."""
    import transformers  # pyright: ignore[reportMissingImports]

    versions = {"transformers": transformers.__version__, "torch": torch.__version__}
    lines = ",\n".join(json.dumps(case) for case in cases())
    (HERE / "bert_layer.json").write_text(f'{{"versions": {json.dumps(versions)}, "cases": [\n{lines}\n]}}\n')
    print(f"bert_layer.json: {len(SIZES)} cases")


if __name__ == "__main__":
    main()
