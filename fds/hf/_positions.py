"""Tables of positions of models that are to read longer sequences than they were made for.

Source: DeepSpeed 0.19.6, ops/sparse_attention/sparse_attention_utils.py.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fds.errors import ComposeError, is_int
from fds.hf._families import family_of, parts_of, sharing_copy


def extend_position_embedding(model: Any, max_position: int) -> Any:
    """Return a copy of a model of transformers with a longer table of positions; all other weights are shared.

    The table repeats, as DeepSpeed does it: position i has the weights of position i modulo the old length. The last
    repetition is cut short where the lengths do not divide. Of RoBERTa, whose positions begin after the number of the
    padding token, the rows before them stay as they are; there are two, and so the table has two more rows than
    positions. `model.config` says the new length; a tokenizer is told by `tokenizer.model_max_length = max_position`.

    Args:
        model: of BERT, RoBERTa or GPT-2, with any head.
        max_position: positions of the new table, more than there are.

    Raises `ComposeError` for a model of another family, one without a table such as Llama, and a length that is not
    larger.
    """
    family = family_of(model, "extend_position_embedding")
    if not family.holder:
        raise ComposeError(
            "the model has no table of positions, it turns queries and keys",
            where="model",
            got=type(model).__name__,
            want="a model of BERT, RoBERTa or GPT-2",
            hint="any length runs; config.rope_parameters scales positions",
        )
    model = sharing_copy(model)
    tables = [(part, getattr(part, family.table)) for _, part in parts_of(model, family.holder)]
    reserved = tables[0][1].padding_idx + 1 if tables and family.after_padding else 0
    old = tables[0][1].weight.shape[0] - reserved if tables else 0
    if not tables or not is_int(max_position, 1) or max_position <= old:
        raise ComposeError(
            "a table of positions becomes longer",
            where="max_position",
            got=f"{max_position!r:.40}, and the model has {old}",
            want="an int, more than there are",
        )
    for part, table in tables:
        _extend(part, family.table, table, reserved, max_position)
    model.config.max_position_embeddings = max_position + reserved
    return model


@torch.no_grad()
def _extend(part: Any, name: str, table: nn.Embedding, reserved: int, positions: int) -> None:
    first, rows = table.weight[:reserved], table.weight[reserved:]
    repeated = rows.repeat(-(-positions // len(rows)), 1)[:positions]
    weight = torch.cat([first, repeated])
    with torch.device("meta"):
        longer = nn.Embedding(len(weight), weight.shape[1], padding_idx=table.padding_idx)
    longer.weight = nn.Parameter(weight, requires_grad=table.weight.requires_grad)
    setattr(part, name, longer.train(table.training))
    for buffer, values in (
        ("position_ids", torch.arange(len(weight), device=weight.device)[None]),
        ("token_type_ids", torch.zeros(1, len(weight), dtype=torch.int64, device=weight.device)),
    ):
        if isinstance(getattr(part, buffer, None), torch.Tensor):
            setattr(part, buffer, values)
