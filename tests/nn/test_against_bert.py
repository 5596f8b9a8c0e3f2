"""The layer against Hugging Face's BertLayer, as recorded and live; tests/golden/bert_layer.py says how."""

import json
from pathlib import Path

import pytest
import torch

from fds.errors import KernelError
from fds.nn import TransformerConfig, TransformerLayer, from_bert
from tests.kernels.accuracy import distance
from tests.scripts import loaded

GOLDEN = Path(__file__).parents[1] / "golden"
CASES = json.loads((GOLDEN / "bert_layer.json").read_text())["cases"]
SIZES = ("hidden_size", "heads", "intermediate_size", "batch", "tokens", "masked")
DTYPES = [torch.float64, torch.float32]


recorder = loaded(GOLDEN / "bert_layer.py")


def bound(sizes: tuple, dtype: torch.dtype) -> float:
    """Say how far rounding may move a result: once for each number that a chain of the layer's sums adds."""
    h, _, i, batch, tokens, _ = sizes
    return torch.finfo(dtype).eps * (4 * h + 2 * i + 2 * batch * tokens + 64)


def ours(sizes: tuple, dtype: torch.dtype, padding: bool = False):
    """Return what `recorder.run` does, of our layer, gradients under our names."""
    h, heads, i, batch, tokens, masked = sizes
    config = TransformerConfig(
        hidden_size=h,
        heads=heads,
        intermediate_size=i,
        pre_layer_norm=False,
        activation="gelu_erf",
        attn_dropout_ratio=0.0,
        hidden_dropout_ratio=0.0,
        adjust_init_range=False,
        layer_norm_eps=recorder.EPS,
    )
    layer = TransformerLayer(config).to(dtype)
    layer.load_state_dict(from_bert(recorder.weights(h, i, dtype)))
    x = recorder.numbers(batch, tokens, h, salt=100, dtype=dtype).requires_grad_()
    mask = recorder.mask(batch, tokens) if masked else None
    out = layer(x, mask if padding or mask is None else recorder.extended(mask, dtype))
    (out * recorder.numbers(*out.shape, salt=101, dtype=dtype)).sum().backward()
    return out.detach(), {"hidden_states": x.grad} | {name: p.grad for name, p in layer.named_parameters()}


def assert_near(sizes: tuple, dtype: torch.dtype, out, gradients, padding: bool = False) -> None:
    got, found = ours(sizes, dtype, padding)
    assert got.dtype == dtype and distance(got, out) <= bound(sizes, dtype)
    theirs = {"hidden_states": gradients.pop("hidden_states")} | from_bert(gradients)
    assert found.keys() == theirs.keys()
    for name in theirs:
        assert found[name].dtype == dtype and distance(found[name], theirs[name]) <= bound(sizes, dtype), name


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(str(case[name]) for name in SIZES))
def test_output_and_gradients_are_those_recorded(case, dtype):
    sizes = tuple(case[name] for name in SIZES)
    h, _, i, batch, tokens, _ = sizes
    shapes = recorder.shapes(h, i) | {"hidden_states": (batch, tokens, h)}
    read = lambda numbers, shape: torch.tensor(numbers, dtype=torch.float64).view(shape)
    for padding in (False, True):  # the boolean mask is that of Hugging Face's additive one
        gradients = {name: read(x, shapes[name]) for name, x in case["gradients"].items()}
        assert_near(sizes, dtype, read(case["out"], (batch, tokens, h)), gradients, padding)


def test_weights_that_are_not_a_layers_are_refused():
    given = recorder.weights(4, 8)
    with pytest.raises(KernelError, match=r"missing output\.dense\.bias; unknown more"):
        from_bert({("more" if name == "output.dense.bias" else name): x for name, x in given.items()})
    with pytest.raises(KernelError, match="not a mapping"):
        from_bert(torch.nn.Linear(2, 2))


@pytest.mark.peers
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "sizes",
    [(48, 4, 96, 3, 17, True), (64, 8, 256, 2, 33, False), (30, 5, 31, 2, 7, True), (768, 12, 3072, 2, 21, True)],
)
def test_output_and_gradients_are_those_of_bert(sizes, dtype):
    assert_near(sizes, dtype, *recorder.run(*sizes, dtype=dtype))
    h, _, i = sizes[:3]
    layer = recorder.build(*sizes[:3])
    loaded = from_bert(layer.state_dict())
    assert loaded["attn_qkvw"].shape == (3 * h, h) and loaded["inter_w"].shape == (i, h)


@pytest.mark.peers
@pytest.mark.filterwarnings("default")
def test_the_golden_values_are_what_bert_says_now():
    for case, kept in zip(recorder.cases(), CASES, strict=True):
        assert [case[name] for name in SIZES] == [kept[name] for name in SIZES]
        for name, x in (case["gradients"] | {"out": case["out"]}).items():
            was = torch.tensor((kept["gradients"] | {"out": kept["out"]})[name], dtype=torch.float64)
            scale = max(float(was.norm()), 1.0)  # the gradient of the key's bias is 0, and its rounding is not
            assert float((torch.tensor(x, dtype=torch.float64) - was).norm()) <= scale * 1e-12, name
