"""Plans that are found by the structure of a module.

`torch.nn`'s attention and transformer layers, and the families of Hugging Face's transformers (`hugging_face`).
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from fds.errors import ComposeError, is_a
from fds.nn.parallel import hugging_face
from fds.nn.parallel.plan import Column, Heads, Part, Row, Sequence as Block, consecutive


def auto_plan(module: nn.Module) -> dict[str, Part]:
    """Return what `fds.tensor_parallel(axis, "auto")` divides of a module: a plan, to be read and changed.

    It maps paths of submodules to what `fds.nn.column`, `row`, `vocab`, `heads`, `replicated` and `sequence` return.
    Everything else is whole on every rank. Known are `nn.MultiheadAttention`, `nn.TransformerEncoderLayer` and
    `nn.TransformerDecoderLayer`, and of transformers GPT-2, BERT, RoBERTa, Llama, Mistral, Qwen2, Qwen3 and T5.

    Raises `ComposeError` for modules of transformers that are not known, and for what is not a module.
    """
    if not is_a(module, nn.Module):
        raise ComposeError("auto_plan takes a module", where="module", got=repr(module)[:80], want="an nn.Module")
    found: dict[str, Part] = {}
    blocks: list[str] = []
    for path, one in module.named_modules():
        at = f"{path}." if path else ""
        if type(one) in (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer):
            found |= {f"{at}linear1": Column(), f"{at}linear2": Row(), path: Block()}
        if type(one) is nn.TransformerDecoderLayer:
            found[f"{at}multihead_attn"] = Heads(cross=True)
        if type(one) in (nn.TransformerEncoder, nn.TransformerDecoder):
            blocks += [f"{at}layers.{i}" for i in range(one.num_layers)]  # pyright: ignore[reportArgumentType]
        if type(one) is nn.MultiheadAttention:
            found.setdefault(path, Heads())
        of_family = hugging_face.parts(module, path, one)
        blocks += [path for path, part in of_family.items() if isinstance(part, Block)]
        found = of_family | found  # what a module says of a submodule stands
    return found | {path: block for path, block in consecutive(blocks).items() if isinstance(found.get(path), Block)}


def unknown(modules: Sequence[nn.Module]) -> ComposeError:
    """Return the error for modules of which nothing is known."""
    return ComposeError(
        "tensor_parallel knows no plan for this",
        where="plan='auto'",
        got=", ".join(type(module).__name__ for module in modules)[:120],
        want='{"blocks.*.up": "column", "blocks.*.down": "row"}',
    )
