"""Documents that are packed into rows for a model of transformers are, under `document_mask`, as each alone."""

import pytest
import torch

import fds

pytestmark = pytest.mark.peers


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_packed_documents_are_as_alone(implementation):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=31, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2
    )
    config._attn_implementation = implementation
    model = LlamaForCausalLM(config).double().eval()
    documents = [torch.randint(0, 31, (n,)) for n in (5, 9, 2)]
    row = fds.data.packed(documents, 16)[0]
    mask = fds.nn.document_mask(row["documents"][None], dtype=torch.float64 if implementation == "eager" else None)
    with torch.no_grad():
        got = model(row["tokens"][None], attention_mask=mask, position_ids=row["positions"][None]).logits[0]
        for number in row["documents"].unique():
            here = row["documents"] == number
            want = model(row["tokens"][here][None]).logits[0]
            # eager attention of transformers takes its softmax in float32
            near = 2.0**-20 if implementation == "eager" else 1e-12
            torch.testing.assert_close(got[here], want, rtol=0, atol=near)
