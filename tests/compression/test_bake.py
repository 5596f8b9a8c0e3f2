"""`bake`: outputs of the plain module are those of an evaluation, bit for bit, and it is as small as it says."""

import copy
import functools
import json
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fds
from fds import plans
from fds.compression import Packed, read_baked
from fds.errors import ComposeError, LossError, StateError, StorageError
from tests.bits import assert_same_bits

TOKENS = torch.arange(24).view(4, 6) % 11


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 32), nn.Linear(32, width, bias=False)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    """An embedding that is the head too, a buffer, and a convolution."""

    def __init__(self):
        super().__init__()
        self.embed, self.block, self.conv = nn.Embedding(11, 16), Block(16), nn.Conv1d(16, 16, 3, padding=1)
        self.bn, self.head = nn.BatchNorm1d(16), nn.Linear(16, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        x = self.block(self.embed(tokens))
        return self.head(self.bn(self.conv(x.mT)).mT)


def layers():
    head = lambda module, x: F.linear(x, module.weight)
    return fds.Layers(
        [
            fds.TiedLayerSpec("embed", nn.Embedding, 11, 16),
            fds.LayerSpec(Block, 16),
            torch.tanh,
            fds.LayerSpec(Block, 16),
            fds.TiedLayerSpec("embed", nn.Embedding, 11, 16, forward_fn=head),
        ],
        lambda out, y: F.cross_entropy(out.flatten(0, 1), y.flatten()),
    )


LAYERS = layers()
VIEWS = {
    "8 bits": [fds.quantize_weights("*", bits=8)],
    "4 bits by 8": [fds.quantize_weights("*", bits=4, group_size=8)],
    "torchao": [fds.quantize_weights("*", bits=8, scheme="torchao")],
    "torchao, 4 by 8": [fds.quantize_weights("*", bits=4, group_size=8, scheme="torchao")],
    "shifted": [fds.quantize_weights("*", bits=4, groups="rows", symmetric=False)],
    "torchao, shifted": [fds.quantize_weights("*", bits=3, symmetric=False, scheme="torchao")],
    "rows of two groups": [fds.quantize_weights("1.*.weight", bits=8, groups=2)],
    "ternary": [fds.quantize_weights("*", bits=2, groups="rows")],
    "binary, and no embedding": [fds.quantize_weights("*.down.weight", "*.up.weight", bits=1)],
    "mixed": [
        fds.quantize_weights("*.up.weight", bits=6, rounding="stochastic"),
        fds.quantize_weights("*.down.weight", bits=(5, 4), group_size=16),
    ],
    "not yet": [fds.quantize_weights("*", bits=4, offset=100)],
    "inputs by rows": [fds.quantize_weights("*", bits=8), fds.quantize_activations(["*.up", "*.down"], bits=4)],
    "inputs by ranges": [fds.quantize_activations(["*.up", "*.down"], range="static", symmetric=False)],
    "inputs not yet": [fds.quantize_activations("*.up", offset=100)],
    "none": [],
}


def trained(views, *more, loss=LAYERS, params=None, batch=(TOKENS, TOKENS)):
    step = fds.compose(*views, *more, fds.adamw(0.01))(loss)
    state = step.init(loss.init if params is None else params, key=2)
    data = step.dimensions.data
    for _ in range(2):
        rows = batch if data is None else tuple(x.chunk(data.size)[data.index] for x in batch)
        state, _ = step(state, rows)
    return step, state


@pytest.mark.parametrize("views", VIEWS.values(), ids=VIEWS)
def test_outputs_are_those_of_an_evaluation_bit_for_bit_after_a_save_too(views, tmp_path):
    step, state = trained(views)
    want = step.evaluate(state, (TOKENS, TOKENS), outputs=True)["outputs"]
    baked = fds.bake(step, state)
    assert_same_bits(baked.module(TOKENS), want)
    assert_same_bits(baked.unpacked()(TOKENS), want)
    assert_same_bits(copy.deepcopy(baked.module)(TOKENS), want)
    ranges = {id(x) for name, x in baked.module.named_buffers() if name.endswith("input_range")}
    held = [x for x in (*baked.module.parameters(), *baked.module.buffers()) if id(x) not in ranges]
    assert baked.num_bytes == sum({id(x): x.nbytes for x in held}.values())
    baked.save(tmp_path)
    empty = fds.bake(*trained([])).module
    assert_same_bits(read_baked(tmp_path, empty)(TOKENS), want)


def test_a_module_that_a_function_calls_with_buffers_and_shared_weights():
    apply, params, buffers = fds.functional(Model())

    def loss_fn(params, tokens, buffers):
        out, new = apply.with_buffers(params, buffers, tokens)
        return F.cross_entropy(out.flatten(0, 1), tokens.flatten()), {"out": out.detach().square().mean()}, new

    views = [fds.quantize_weights("*", bits=4, groups="rows", scheme="torchao")]
    step, state = trained(views, loss=fds.with_buffers(loss_fn, buffers), params=params, batch=TOKENS)
    baked = fds.bake(step, state)
    out = baked.module(TOKENS)
    assert_same_bits(out.square().mean(), step.evaluate(state, TOKENS)["out"])
    assert {entry.bits for entry in baked.entries} == {4, None}
    assert baked.module.head.weight_codes is baked.module.embed.weight_codes
    assert_same_bits(fds.bake(step, state, Model()).module(TOKENS), out)
    assert type(baked.module.conv).__name__ == "PackedConv1d" and "weight: 4 bits" in repr(baked.module.conv)


@pytest.mark.parametrize("stage", [None, 1, 3])
def test_ranks_that_share_the_state_have_the_whole_model_each(stage):
    views, want = VIEWS["4 bits by 8"], fds.bake(*trained(VIEWS["4 bits by 8"], fds.accumulate(2))).module(TOKENS)

    def body():
        mesh = fds.mesh(ranks=2)
        share = (
            fds.pipeline(plans.gpipe, mesh["ranks"], num_microbatches=2)
            if stage is None
            else fds.shard_optimizer(mesh["ranks"], stage=stage)
        )
        step, state = trained(views, share)
        baked = fds.bake(step, state)
        return baked.module(TOKENS), baked.num_bytes

    (first, size), (second, _) = fds.simulate(body, 2)
    assert_same_bits(first, second)
    assert size < 0.3 * sum(x.nbytes for x in LAYERS.init.trace().values())
    torch.testing.assert_close(first, want, rtol=0.1, atol=0.1)  # a weight at the edge of two integers may be in either


@fds.step.transform
def halved():
    """Show the loss half of each weight, in what no grid is any more."""
    return lambda step: fds.step.fill(step, view=lambda x, leaf, call: x - x * 0.3 if x.dim() > 1 else x)


def test_what_another_view_changes_afterwards_is_no_grid_any_more():
    step, state = trained([fds.quantize_weights("*", bits=4), halved()])
    want = step.evaluate(state, (TOKENS, TOKENS), outputs=True)["outputs"]
    baked = fds.bake(step, state)
    assert_same_bits(baked.module(TOKENS), want)
    assert {entry.bits for entry in baked.entries} == {None}
    before, state = trained([halved(), fds.quantize_weights("*", bits=4)])
    baked = fds.bake(before, state)
    assert {entry.bits for entry in baked.entries} == {4, None}
    assert_same_bits(baked.module(TOKENS), before.evaluate(state, (TOKENS, TOKENS), outputs=True)["outputs"])


def test_in_the_dtype_of_the_loss():
    step, state = trained(VIEWS["4 bits by 8"], fds.precision(torch.bfloat16))
    want = step.evaluate(state, (TOKENS, TOKENS), outputs=True)["outputs"]
    baked = fds.bake(step, state)
    assert want.dtype is torch.bfloat16
    assert_same_bits(baked.module(TOKENS), want)
    assert baked.entries[0].bits == 4


def test_a_report_says_what_is_smaller_and_whether_it_is_faster():
    baked = fds.bake(*trained(VIEWS["4 bits by 8"]))
    speed = baked.measure(TOKENS, repeats=3)
    lines = baked.report(speed).splitlines()
    assert lines[1].split() == ["embed.weight", "11", "x", "16", "4", "704", "176"]  # 88 of codes, 88 of scales
    assert "faster than" in lines[-1] or "as fast as" in lines[-1]
    assert "no faster than" in str(fds.compression.Speed(2.0, 2.0))
    assert "2.00 times as fast as" in str(fds.compression.Speed(1.0, 2.0))


def test_files_are_those_of_compressed_tensors(tmp_path):
    """Integers are read by the words of the format, not by what wrote them."""
    from safetensors.torch import load_file

    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["Any"], "quantization_config": {"old": 1}}))
    views = [fds.quantize_weights("*", bits=4, group_size=8, scheme="torchao")]
    step, state = trained(views)
    baked = fds.bake(step, state)
    files = baked.save(tmp_path)
    tensors, config = load_file(files[0]), json.loads(files[1].read_text())
    assert config["architectures"] == ["Any"]
    group = config["quantization_config"]["config_groups"]["group_0"]
    assert set(group["targets"]) == {"embed", "1.up", "1.down", "3.up", "3.down"}
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 8}
    assert group["weights"].items() >= weights.items()
    seen = fds.step.seen_parameters(step, state)
    for path in group["targets"]:
        rows, columns = tensors[f"{path}.weight_shape"].tolist()
        words, scale = tensors[f"{path}.weight_packed"], tensors[f"{path}.weight_scale"]
        assert words.shape == (rows, -(-columns * 4 // 32)) and scale.shape == (rows, columns // 8)
        integer = lambda row, column, words=words: (int(words[row, column // 8]) >> (4 * (column % 8))) % 16 - 8
        values = torch.tensor([[integer(i, j) for j in range(columns)] for i in range(rows)])
        assert_same_bits(values.float() * scale.repeat_interleave(8, 1) + 0.0, seen[f"{path}.weight"])
    assert "1.norm.weight" in tensors and "1.up.weight" not in tensors


def test_what_cannot_be_baked():
    step, state = trained([])
    with pytest.raises(ComposeError, match="a step and its state"):
        fds.bake(state, step)
    with pytest.raises(ComposeError, match="number of calls"):
        fds.bake(step, state).measure(TOKENS, repeats=0)
    with pytest.raises(LossError, match="not a module"):
        fds.bake(step, state, LAYERS)
    with pytest.raises(LossError, match="one module"):
        fds.bake(step, state, nn.Linear(2, 2))
    for patterns in (["*"], ["*.up.weight", "1.down.weight"]):
        another, _ = trained([fds.prune_weights(*patterns, density=0.5)])
        _, of_down = trained([fds.prune_weights("*.down.weight", density=0.5)] if patterns != ["*"] else [])
        for read in (fds.bake, lambda step, state: step.evaluate(state, (TOKENS, TOKENS))):
            with pytest.raises(StateError, match="another composition's"):
                read(another, of_down)
    raw = fds.compose(fds.sgd(0.1))(lambda p, x: (p["w"] * x).sum())
    with pytest.raises(LossError, match="one module"):
        fds.bake(raw, raw.init({"w": torch.ones(2)}))


def test_what_cannot_be_written_or_read(tmp_path):
    baked = fds.bake(*trained(VIEWS["8 bits"]))
    with pytest.raises(StorageError):
        baked.save(3)
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError):
        baked.save(tmp_path / "file")
    with pytest.raises(StorageError):
        read_baked(tmp_path / "nowhere", baked.module)
    for text in ("[1]", "no JSON"):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(StorageError, match="no JSON object"):
            baked.save(tmp_path)
        with pytest.raises(StorageError, match="no baked model"):
            read_baked(tmp_path, baked.module)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(StorageError, match="no baked model"):
        read_baked(tmp_path, baked.module)
    baked.save(tmp_path)
    for other in (nn.Linear(2, 2), nn.Sequential(nn.Embedding(3, 3))):
        with pytest.raises(StorageError, match="another structure"):
            read_baked(tmp_path, other)
    for other in (None, copy.deepcopy(baked.unpacked()).to("meta")):
        with pytest.raises(StorageError, match="not a module"):
            read_baked(tmp_path, other)


def test_a_file_that_says_something_else_is_no_baked_model(tmp_path):
    views = [
        fds.prune_rows("0.weight", related="2.weight", density=0.5),
        fds.quantize_weights("*.weight", bits=4),
        fds.quantize_activations(["0", "2"]),
    ]
    new = lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
    loss = fds.Layers([*new()], lambda out, y: (out - y).square().mean())
    fds.bake(*trained(views, loss=loss, batch=(torch.ones(4, 6), torch.ones(4, 4)))).save(tmp_path)
    text, module = (tmp_path / "config.json").read_text(), new()
    before = copy.deepcopy(module.state_dict())
    means = {("inputs", "0", "bits"): [5], ("inputs", "0", "symmetric"): [True]}
    of = {"integers": ("0.weight", ["bits", "group", "shape", "scheme", "dtype"]), "inputs": ("0", ["bits", "per"])}
    places: list[tuple] = [(key,) for key in ("integers", "inputs", "cuts")]
    places += [(key, name, word) for key, (name, words) in of.items() for word in words]
    for place in [*places, ("cuts", 0, "length"), ("inputs", "0", "symmetric"), ("integers", "2.weight")]:
        for value in ("gone", None, 5, -1, 0, "x", [1], {"a": 1}, 1.5, 10**30, True):
            if value in means.get(place, []):
                continue
            config = json.loads(text)
            *path, last = ("fds", *place)
            at = functools.reduce(lambda at, key: at[key], path, config)
            at.__delitem__(last) if value == "gone" else at.__setitem__(last, value)
            (tmp_path / "config.json").write_text(json.dumps(config))
            with pytest.raises(StorageError):
                read_baked(tmp_path, module)
    assert all(torch.equal(x, before[name]) for name, x in module.state_dict().items())


def test_what_is_read_twice_is_as_what_is_read_once(tmp_path):
    both = fds.quantize_weights("*.weight", bits=4), fds.quantize_activations("*.up", bits=3, range="static")
    bakes = [fds.bake(*trained(views)) for views in (both, both[1:], both[:1], ())]
    module = fds.bake(*trained([])).module
    for i in (0, 0, 1, 2, 3, 1, 0):
        bakes[i].save(tmp_path / str(i))
        assert_same_bits(read_baked(tmp_path / str(i), module)(TOKENS), bakes[i].module(TOKENS))
        assert module.state_dict().keys() == bakes[i].module.state_dict().keys()


@pytest.mark.parametrize("view", ["8 bits", "ternary", "none"])
def test_a_module_of_another_structure_stays_as_it_is(view, tmp_path):
    loss = fds.Layers([nn.Linear(8, 8), nn.Linear(8, 8)], lambda out, y: (out - y).square().mean())
    fds.bake(*trained(VIEWS[view], loss=loss, batch=(torch.ones(4, 8), torch.ones(4, 8)))).save(tmp_path)
    first = lambda: nn.Linear(8, 8)
    read_baked(tmp_path, nn.Sequential(first(), first()))
    for other in (
        nn.Sequential(first(), nn.Linear(8, 8, bias=False)),
        nn.Sequential(first(), nn.Linear(8, 4)),
        nn.Sequential(first(), nn.Linear(8, 8).double()),
        nn.Sequential(first(), nn.Conv1d(8, 8, 1)),
        nn.Sequential(first(), nn.Linear(8, 8), nn.Linear(8, 8)),
        nn.Sequential(first(), nn.ReLU()),
    ):
        before, words = copy.deepcopy(other.state_dict()), repr(other)
        with pytest.raises(StorageError, match="another structure"):
            read_baked(tmp_path, other)
        assert repr(other) == words and other.state_dict().keys() == before.keys()
        assert all(torch.equal(x, before[name]) for name, x in other.state_dict().items())


def test_a_packed_module_is_pickled():
    linear = nn.Linear(8, 4)
    packed = fds.compression.pack(linear.weight, 4)
    from fds.compression.packed_modules import hold

    hold(linear, "weight", packed)
    again = pickle.loads(pickle.dumps(linear))
    x = torch.ones(2, 8)
    assert_same_bits(again(x), linear(x))
    assert isinstance(packed, Packed) and set(linear.state_dict()) == {"weight_codes", "weight_scales", "bias"}


def test_products_in_float8_are_in_no_plain_module():
    with pytest.raises(ComposeError, match="float8"):
        fds.bake(*trained([fds.float8("*.up")]))


def test_each_weight_is_packed_by_the_view_that_rounds_it():
    views = [
        fds.quantize_weights("1.*", bits=8),
        fds.quantize_weights("3.*", bits=4),
        fds.quantize_weights("e*", bits=2),
    ]
    step = fds.compose(*views, fds.sgd(0.1))(LAYERS)
    baked = fds.bake(step, step.init(LAYERS.init))
    matrices = {entry.name: entry.bits for entry in baked.entries if len(entry.shape) > 1}
    assert matrices == {
        "embed.weight": 2,
        **dict.fromkeys(("1.up.weight", "1.down.weight"), 8),
        **dict.fromkeys(("3.up.weight", "3.down.weight"), 4),
    }
