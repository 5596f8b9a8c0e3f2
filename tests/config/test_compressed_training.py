"""`compression_training` of a JSON: what DeepSpeed's modules compute, the files of its examples, what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fds
from fds.compression import masks
from fds.config import TrainingConfig
from fds.errors import ConfigError
from tests.golden import compressed_modules as golden, pruning_masks
from tests.golden.compressed_modules import ATTENTION, REST, Bert, ResNet, filled, inputs, technique, weights

RECORDED = golden.recorded()
TRAINED = {"train_batch_size": 2, "optimizer": {"type": "Adam", "params": {"lr": 1e-3}}}


def composed(model: nn.Module, section: dict[str, Any], **more: Any) -> tuple[Any, Any]:
    """Return the step of a JSON for a module, on the sum of squares of what it returns, and the first state."""
    config = TrainingConfig.of(TRAINED | {"compression_training": section} | more)
    model = config.with_scores(model)
    apply, params, _ = fds.functional(model)
    for name, x in params.items():
        if name.endswith("_scores"):
            params[name] = golden.numbers(*x.shape, start=7)
    transforms = config.transforms(fds.mesh(dp=1), model=model)
    step = fds.compose(*transforms)(lambda params, x: apply(params, x).float().square().sum())
    return step, step.init(params, key=0)


@pytest.mark.parametrize("name", golden.CASES)
def test_a_first_forward_is_that_of_deepspeeds_modules(name):
    kind, section = golden.CASES[name]
    make, given = golden.MODELS[kind]
    step, state = composed(filled(make()), section)
    got = step.evaluate(state, given, outputs=True)["outputs"]
    want = torch.tensor(RECORDED[name]["outputs"])
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)


@pytest.mark.filterwarnings("ignore::fds.errors.LossWarning")  # of a network in eval mode, as it was recorded
@pytest.mark.parametrize("name", ["sparse", "sparse and of 4 bits", "sparse convolutions"])
def test_masks_by_size_are_deepspeeds_and_weights_train_under_them(name):
    kind, section = golden.CASES[name]
    make, given = golden.MODELS[kind]
    model = filled(make())
    step, state = composed(model, section)
    state, _ = step(state, given)
    state, _ = step(state, given)  # whose weights have other sizes
    shapes = {name: x.shape for name, x in model.named_parameters()}
    got = {
        name: masks.unpack(x, shapes[name][1:].numel()).flatten() for name, x in state.slots["pruned_weights"].items()
    }
    assert {name: x.int().tolist() for name, x in got.items()} == RECORDED[name]["masks"]


# the files of DeepSpeedExamples/compression that compress: what of them matters, under their names
ALL = ["attention.self", "intermediate", "word_embeddings", "output.dense"]
LINEAR = ["attention.self", "intermediate", "output.dense"]
REDUCED = {
    "layer_reduction": {
        "enabled": True,
        "keep_number_layer": 2,
        "module_name_prefix": "bert.encoder.layer",
        "teacher_layer": [0, 2],
        "other_module_name": ["bert.pooler", "bert.embeddings", "classifier"],
    }
}
ATTN, MLP = ["attn.c_attn", "attn.c_proj"], ["mlp.c_fc", "mlp.c_proj"]


def groups(*pairs: tuple[int, list[str]], cut: int, in_forward: bool) -> dict[str, Any]:
    of = lambda bits: {"start_bits": bits, "target_bits": bits, "quantization_period": 0}
    return technique(
        "weight_quantization",
        {f"wq{i}": (of(bits), modules) for i, (bits, modules) in enumerate(pairs, 1)},
        quantize_groups=cut,
        quantize_weight_in_forward=in_forward,
        fp16_mixed_quantize={"enabled": False, "quantize_change_ratio": 0.1},
    )


FILES = {
    "bert/XTC/ds_config_W1A8_Qgroup1_fp32": ("Bert", groups((1, ALL), cut=1, in_forward=True) | inputs(8, LINEAR)),
    "bert/XTC/ds_config_layer_reduction_W1Q8_fp32": (
        "Bert",
        REDUCED | groups((1, ALL), cut=1, in_forward=True) | inputs(8, LINEAR),
    ),
    "bert/XTC/ds_config_layer_reduction_fp16": ("Bert", REDUCED),
    "bert/ZeroQuant/ds_config_W48A8_Qgroup48_lkd_fp32": (
        "Bert",
        groups((8, ATTENTION), (4, REST), cut=48, in_forward=True) | inputs(8, ATTENTION),
    ),
    "bert/ZeroQuant/ds_config_W8A8_Qgroup48_fp32": (
        "Bert",
        groups((8, ALL), cut=48, in_forward=True) | inputs(8, LINEAR),
    ),
    "bert/ds_config_W1A8_Qgroup64_fp16": ("Bert", groups((1, ALL), cut=64, in_forward=False) | inputs(8, LINEAR)),
    "bert/ds_config_W1A8_Qgroup64_fp32": ("Bert", groups((1, ALL), cut=64, in_forward=True) | inputs(8, LINEAR)),
    "bert/ds_config_W1or2A8_Qgroup64_fp16": (
        "Bert",
        groups((1, ALL[:3]), (2, ["output.dense"]), cut=64, in_forward=False) | inputs(8, LINEAR),
    ),
    "cifar/ds_config_channel_prune": (
        "ResNet",
        golden.pruned("channel_pruning", 0.5, ["layer....conv1"], "topk", related=[["layer....conv2", "layer....bn1"]]),
    ),
    "bert/ds_config_TEMPLATE, rows and heads": (
        "Bert",
        golden.pruned("row_pruning", 0.5, ["intermediate.dense"], "topk", related=[[r"layer.\w+.output.dense"]])
        | golden.pruned(
            "head_pruning",
            0.5,
            ["attention.output.dense"],
            "topk",
            num_heads=golden.HEADS,
            related=[["self.query", "self.key", "self.value"]],
        ),
    ),
    "gpt2/ds_config_W4or8A8_Qgroup64_fp16": (
        "GPT2",
        groups((4, MLP), (8, ATTN), cut=64, in_forward=False) | inputs(8, ATTN + MLP),
    ),
    "gpt2/ds_config_W4or8A8_Qgroup64_fp32": (
        "GPT2",
        groups((4, MLP), (8, ATTN), cut=64, in_forward=True) | inputs(8, ATTN + MLP),
    ),
    "gpt2/ds_config_W8A8_Qgroup64_fp16": (
        "GPT2",
        groups((8, ATTN + MLP), cut=64, in_forward=False) | inputs(8, ATTN + MLP),
    ),
    "gpt2/ds_config_W8A8_Qgroup64_fp32": (
        "GPT2",
        groups((8, ATTN + MLP), cut=64, in_forward=True) | inputs(8, ATTN + MLP),
    ),
}


@pytest.mark.filterwarnings("ignore::fds.errors.LossWarning")
@pytest.mark.parametrize("name", FILES)
def test_the_files_of_deepspeeds_examples_compose_and_train(name):
    kind, section = FILES[name]
    make, given = golden.MODELS[kind]
    model = filled(make())
    fp16 = {"fp16": {"enabled": name.endswith("fp16"), "initial_scale_power": 4}}
    if "layer_reduction" in section:
        config = TrainingConfig.of(TRAINED | {"compression_training": section})
        model = filled(Bert(2))
        begun = config.reduce_layers(dict(filled(Bert()).named_parameters()), dict(model.named_parameters()))
        model.load_state_dict(begun)
    step, state = composed(model, section, prescale_gradients=True, gradient_clipping=1.0, **fp16)
    plain, _ = composed(model, {}, gradient_clipping=1.0, **fp16)
    before = step.params(state)
    losses = []
    for _ in range(3):
        state, metrics = step(state, given)
        losses.append(float(metrics["loss"]))
    assert losses[-1] < losses[0]
    own = {name: x for name, x in before.items() if not name.endswith("_scores")}
    uncompressed = float(plain.evaluate(plain.init(own), given)["loss"])
    assert (losses[0] == uncompressed) == (section.keys() == {"layer_reduction"})
    assert not all(torch.equal(x, before[name]) for name, x in step.params(state).items())


def test_the_file_of_quantized_bert_as_it_is():
    config = TrainingConfig.of(Path(__file__).parent / "shapes" / "bert_compression.json")
    model = filled(Bert())
    apply, params, _ = fds.functional(model)
    transforms = config.transforms(fds.mesh(dp=1), model=model)
    names = [part.name for part in transforms]
    assert names.count("quantize_weights") == names.count("quantize_activations") == 1
    step = fds.compose(*transforms, fds.adamw(1e-3))(lambda params, x: apply(params, x).float().square().mean())
    _, metrics = step(step.init(params), golden.TOKENS)
    assert metrics["loss"] > 0


def test_bits_that_fall_are_those_of_moq():
    falling = technique(
        "weight_quantization",
        {"a": ({"start_bits": 8, "target_bits": 4, "quantization_period": 3}, ["attention.self"])},
        quantize_groups=4,
        quantization_type="asymmetric",
        rounding="stochastic",
        schedule_offset=2,
        fp16_mixed_quantize={"enabled": True, "quantize_change_ratio": 0.25},
    )
    step, _ = composed(filled(Bert()), falling, fp16={"enabled": True})
    by_hand = fds.quantize_weights(
        *(f"bert.encoder.layer.*.attention.self.{x}.weight" for x in ("query", "key", "value")),
        bits=(8, 4),
        groups=4,
        symmetric=False,
        rounding="stochastic",
        offset=2,
        period=3,
        mixing=0.25,
    )
    assert str(by_hand) in map(str, step.composition)


def test_eigenvalues_of_layers_are_the_factors_of_moq():
    group = {"start_bits": 8, "target_bits": 4, "quantization_period": 3}
    section = technique("weight_quantization", {"a": (group, ["attention.self"]), "b": (group, ["intermediate"])})
    measured = {"enabled": True, "layer_name": "bert.encoder.layer", "layer_num": golden.LAYERS, "max_iter": 2}
    more = {"fp16": {"enabled": True}, "quantize_training": {"eigenvalue": measured}}
    config, model = TrainingConfig.of(TRAINED | {"compression_training": section} | more), filled(Bert())
    apply, params, _ = fds.functional(model)
    found = config.eigenvalues(lambda params, x: apply(params, x).square().sum(), params, golden.TOKENS)
    factors = {block: float(x.normalized) for block, x in found.items()}
    square = lambda model, x: model(x).square().sum()
    assert config.eigenvalues(square, model, golden.TOKENS) == found
    assert list(factors) == [f"bert.encoder.layer.{i}.*" for i in range(golden.LAYERS)]
    transforms = config.transforms(fds.mesh(dp=1), model=model, factors=found)
    rounding = [text for text in map(str, transforms) if text.startswith("quantize_weights")]
    assert len(rounding) == 2 and all(f"factors={factors!r}" in text for text in rounding)
    step = fds.compose(*transforms)(lambda params, x: apply(params, x).float().square().sum())
    step(step.init(params), golden.TOKENS)


MOQ = technique("weight_quantization", {"a": ({"start_bits": 8, "target_bits": 4, "quantization_period": 2}, ["fc"])})
MEASURED = {"enabled": True, "layer_name": "h", "layer_num": 2}


class Deep(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        blocks = (nn.ModuleDict({"fc": nn.Linear(4, 4), "norm": nn.LayerNorm(4)}) for _ in range(2))
        self.h, self.head = nn.ModuleList(blocks), nn.Linear(4, 1)

    def forward(self, x):
        for block in self.h:
            x = block["norm"](x + torch.tanh(block["fc"](x)))
        return self.head(x)


def deep_loss(model, batch):
    x, y = batch
    return (model(x).float() - y).square().mean()


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("where", ["eigenvalue", "quantize_training"])
def test_initialize_measures_the_layers_that_eigenvalue_names(ranks, where):
    """The factors are those of the first batch, of all ranks together, and of the model as it is."""
    section = {"compression_training": MOQ, "fp16": {"enabled": True, "initial_scale_power": 4}}
    section |= {where: MEASURED} if where == "eigenvalue" else {where: {"eigenvalue": MEASURED}}
    config = TrainingConfig.of(TRAINED | section | {"train_batch_size": 8})
    g = torch.Generator().manual_seed(1)
    data = [(torch.randn(4, generator=g), torch.randn(1, generator=g)) for _ in range(8)]
    apply, params, _ = fds.functional(Deep())
    loss_fn = lambda params, batch: deep_loss(lambda x: apply(params, x), batch)
    rows = next(iter(fds.data.DistributedLoader(data, 8)))
    want = fds.curvature.top_eigenvalue(loss_fn, params, rows, blocks=("h.0.*", "h.1.*"), stability=1e-6)

    def run():
        step, state, loader, _ = fds.initialize(Deep(), deep_loss, config=config, training_data=data)
        (view,) = step.view
        assert view.factors.keys() == want.keys() and len({*view.factors.values()}) == 2
        for block, (factor,) in view.factors.items():
            assert factor == pytest.approx(want[block].normalized, rel=1e-4)
        batch = next(iter(loader))
        step(state, batch)

    fds.simulate(run, ranks) if ranks > 1 else run()


def test_initialize_says_that_there_is_nothing_to_measure_with_and_takes_factors():
    config = TRAINED | {"compression_training": MOQ, "fp16": {"enabled": True}, "eigenvalue": MEASURED}
    with pytest.warns(UserWarning, match="fds.initialize\\(model, loss, config=config, factors=factors\\)"):
        step, *_ = fds.initialize(Deep(), deep_loss, config=config)
    assert not step.view[0].factors
    batch = torch.ones(2, 4), torch.ones(2, 1)
    factors = TrainingConfig.of(config).eigenvalues(deep_loss, Deep(), batch)
    step, state, *_ = fds.initialize(Deep(), deep_loss, config=config, factors=factors)
    assert step.view[0].factors == {block: (x.normalized,) for block, x in factors.items()}
    step(state, batch)
    fixed = technique("weight_quantization", {"a": ({"start_bits": 4, "target_bits": 4}, ["fc"])})
    none, *_ = fds.initialize(Deep(), deep_loss, config=config | {"compression_training": fixed})  # no bits fall
    assert not none.view[0].factors
    with pytest.raises(ConfigError, match="bits fall") as refused:
        fds.initialize(Deep(), deep_loss, config=config | {"compression_training": fixed}, factors=factors)
    assert "factors=" in refused.value.where
    for nowhere in ({"blocks.0.*": 0.5}, {0: 0.5}):
        with pytest.raises(ConfigError, match="of no parameter"):
            fds.initialize(Deep(), deep_loss, config=config, factors=nowhere)
    for layers, where in (({"layer_name": "blocks"}, "layer_name"), ({"layer_num": 0}, "layer_num")):
        wrong = TrainingConfig.of(config | {"eigenvalue": MEASURED | layers})
        with pytest.raises(ConfigError, match="layer") as refused:
            wrong.eigenvalues(deep_loss, Deep(), batch)
        assert where in refused.value.where


SUMS = json.loads((Path(pruning_masks.__file__).parent / "pruning_masks.json").read_text())["sums"]


@pytest.mark.parametrize("case", SUMS, ids=[str(i) for i in range(len(SUMS))])
def test_masks_and_losses_of_snip_momentum_are_those_of_deepspeeds_pruners(case):
    model = pruning_masks.Net()
    for name, x in model.named_parameters():
        x.data = pruning_masks.drawn(name, x.shape)
    config = {
        "train_batch_size": 5,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "SGD", "params": {"lr": pruning_masks.LR}},
        "compression_training": {"sparse_pruning": case["section"]},
    }
    loss = lambda model, batch: (model(batch[0]) - batch[1]).square().mean()
    step, state, *_ = fds.initialize(model, loss, config=config)
    losses, stays = [], []
    for call in range(10):
        seen = state if step.after else None  # masks that are made after a call are those of the next one
        state, metrics = step(state, pruning_masks.rows(call))
        losses.append(metrics["loss"].item())
        made = (seen or state).slots["pruned_weights"]
        rows = [masks.unpack(words, state.params[name].shape[1]) for name, words in made.items()]
        stays.append(" ".join("".join(map(str, x.flatten().tolist())) for x in rows))
    assert [*made] == case["weights"] and stays == case["masks"]
    assert losses == pytest.approx(case["losses"], rel=1e-5)


def by_sums(**more: Any) -> dict[str, Any]:
    shared = {"enabled": True, "method": "snip_momentum", "schedule_offset": 2, **more}
    return {"sparse_pruning": {"shared_parameters": shared, "different_groups": {}}}


def test_snip_momentum_takes_all_layers_but_the_last_and_those_that_are_excluded_or_of_no_blocks():
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Flatten(), nn.Linear(16, 8), nn.Linear(8, 6), nn.Linear(6, 8))
    for more, names in (
        ([], ["0.weight", "2.weight"]),
        ([nn.Dropout()], ["0.weight", "2.weight"]),
        ([nn.ReLU()], ["0.weight", "2.weight", "4.weight"]),
    ):
        step, state, *_ = fds.initialize(
            nn.Sequential(*model, *more),
            lambda model, x: model(x).square().mean(),
            config=TRAINED | {"compression_training": by_sums(), "bf16": {"enabled": True}},
        )
        assert [*state.slots["pruned_weights"]] == names
    assert "keep_float32=('*weight_scores',)" in str(step.composition)
    assert "by_name({'*weight_scores': sensitivity(0.9), '*': adamw(lr=0.001" in str(step.composition)
    new, _ = step(state, torch.ones(2, 1, 4, 4))
    assert new.params["0.weight_scores"].dtype is torch.float32 and bool(new.params["0.weight_scores"].any())


def test_sums_of_faint_gradients_are_kept_in_half_precision():
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 4)), torch.randn(4, 32)
    config = TRAINED | {"compression_training": by_sums(), "zero_optimization": {"stage": 2}, "train_batch_size": 4}

    def sums(**more: Any) -> torch.Tensor:
        loss = lambda model, x: 1e-4 * model(x).float().square().mean()
        step, state, *_ = fds.initialize(model, loss, config=config | more)
        data = step.dimensions.data
        state, _ = step(state, x if data is None else x.chunk(data.size)[data.index])
        return step.params(state)["0.weight_scores"]

    want = sums()
    for got in fds.simulate(lambda: sums(fp16={"enabled": True, "initial_scale_power": 16}), 2):
        torch.testing.assert_close(got, want, rtol=0.1, atol=float(want.mean()) / 100)


def test_an_optimizer_of_ones_own_stands_beside_that_of_sums():
    config = {"train_batch_size": 2, "compression_training": by_sums(schedule_offset_end=9, schedule_offset_stride=3)}
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    square, rate = (lambda model, x: model(x).square().mean()), fds.schedules.warmup(0.1)
    step, *_ = fds.initialize(model, square, config=config, optimizer=fds.adamw, schedule=rate)
    assert str(step.optimizer) == str(
        fds.by_name({"*weight_scores": fds.compression.sensitivity(), "*": fds.adamw(rate)})
    )
    of_json = config | {"optimizer": {"type": "Adam", "params": {"lr": 0.5}}}
    step, *_ = fds.initialize(model, square, config=of_json, schedule=rate)
    assert "lr=warmup(0.1" in str(step.optimizer) and "sensitivity" in str(step.optimizer)
    text = TrainingConfig.of(of_json).explain({"dp": 1}, model=model)
    assert "prune_weights('0.weight', method='snip_momentum', block='4x1', scope='global', density=0.1" in text
    assert "fds.by_name({'*weight_scores': fds.compression.sensitivity(), '*': fds.adamw(0.5" in text


@pytest.mark.parametrize(
    ("more", "where"),
    [
        ({"block_pattern": "4by1"}, "shared_parameters.block_pattern"),
        ({"block_pattern": "5x1"}, "shared_parameters.block_pattern, excluded_modules"),
        ({"excluded_modules": [""]}, "shared_parameters.block_pattern, excluded_modules"),
        ({"excluded_modules": ["("]}, "shared_parameters.excluded_modules"),
    ],
)
def test_blocks_and_names_that_snip_momentum_cannot_take_are_refused(more, where):
    with pytest.raises(ConfigError) as refused:
        composed(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), by_sums(**more))
    assert refused.value.where == f"compression_training.sparse_pruning.{where}" and refused.value.want


def test_snip_momentum_has_no_groups():
    section = by_sums()
    section["sparse_pruning"]["different_groups"] = {"a": {"params": {"dense_ratio": 0.5}}}
    with pytest.raises(ConfigError, match="no groups"):
        composed(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), section)


def test_a_student_begins_with_layers_of_its_teacher_and_else_with_what_is_named():
    config = TrainingConfig.of(TRAINED | {"compression_training": REDUCED})
    section = {"layer_reduction": REDUCED["layer_reduction"] | {"other_module_name": ["bert.embeddings"]}}
    some = TrainingConfig.of(TRAINED | {"compression_training": section})
    teacher = dict(filled(Bert()).named_parameters())
    own = {name: torch.zeros_like(x) for name, x in Bert(2).named_parameters()}
    begun = some.reduce_layers(teacher, own)
    assert torch.equal(
        begun["bert.encoder.layer.1.output.dense.bias"], teacher["bert.encoder.layer.2.output.dense.bias"]
    )
    words = "bert.embeddings.word_embeddings.weight"
    assert torch.equal(begun[words], teacher[words]) and begun[words] is not teacher[words]
    assert not begun["classifier.weight"].any() and not begun["bert.pooler.weight"].any()
    whole = config.reduce_layers(teacher)
    assert torch.equal(whole["classifier.weight"], teacher["classifier.weight"]) and whole.keys() == own.keys()
    off = TrainingConfig.of(TRAINED).reduce_layers(teacher)
    assert off.keys() == teacher.keys()


@pytest.mark.parametrize(
    ("change", "student", "where"),
    [
        ({"teacher_layer": None, "keep_number_layer": None}, None, "layer_reduction.teacher_layer"),
        ({"module_name_prefix": None}, None, "layer_reduction.module_name_prefix"),
        ({"module_name_prefix": "bert.layer"}, None, "layer_reduction.teacher_layer, module_name_prefix"),
        ({"teacher_layer": [0, 7]}, None, "layer_reduction.teacher_layer, module_name_prefix"),
        ({}, 3, "layer_reduction, bert.encoder.layer.2.attention.self.query.weight"),
    ],
)
def test_a_student_that_its_teacher_cannot_make_is_refused(change, student, where):
    section = {"layer_reduction": REDUCED["layer_reduction"] | change}
    config = TrainingConfig.of(TRAINED | {"compression_training": section})
    own = None if student is None else dict(Bert(student).named_parameters())
    with pytest.raises(ConfigError) as refused:
        config.reduce_layers(dict(filled(Bert()).named_parameters()), own)
    assert refused.value.where == f"compression_training.{where}" and refused.value.want


def test_what_is_related_goes_in_pairs_and_its_patterns_too():
    step, _ = composed(filled(Bert()), FILES["bert/ds_config_TEMPLATE, rows and heads"][1])
    layer = "bert.encoder.layer.*"
    of_heads = tuple(f"{layer}.attention.self.{x}.weight" for x in ("query", "key", "value"))
    rows = fds.prune_rows(
        f"{layer}.intermediate.dense.weight", density=0.5, method="topk", related=(f"{layer}.output.dense.weight",)
    )
    output = f"{layer}.attention.output.dense.weight"
    heads = fds.prune_heads(output, num_heads=golden.HEADS, density=0.5, method="topk", related=of_heads)
    assert {str(rows), str(heads)} < set(map(str, step.composition))
    of_one = golden.pruned("row_pruning", 0.5, ["layer.1.intermediate"], related=[["layer.1.output.dense"]])
    step, _ = composed(filled(Bert()), of_one)
    assert "related=('bert.encoder.layer.1.output.dense.weight',)" in str(step.composition)


@pytest.mark.filterwarnings("ignore::fds.errors.LossWarning")
def test_what_is_related_is_masked_from_the_start_and_channels_go_by_size():
    section = golden.pruned("channel_pruning", 0.5, ["layer....conv1"], related=[["layer....conv2", "layer....bn1"]])
    model = filled(ResNet())
    step, state = composed(model, section)
    state, _ = step(state, golden.IMAGES)
    got = step.evaluate(state, golden.IMAGES, outputs=True)["outputs"]
    by_hand = dict(step.params(state))
    for layer in ("layer1.0", "layer2.0"):
        sizes = dict(model.named_parameters())[f"{layer}.conv1.weight"].abs().sum((1, 2, 3))
        kept = torch.zeros(8).scatter(0, sizes.topk(4).indices, 1.0)
        by_hand[f"{layer}.conv1.weight"] = by_hand[f"{layer}.conv1.weight"] * kept[:, None, None, None]
        by_hand[f"{layer}.conv2.weight"] = by_hand[f"{layer}.conv2.weight"] * kept[None, :, None, None]
    torch.testing.assert_close(got, torch.func.functional_call(model, by_hand, golden.IMAGES), rtol=1e-6, atol=1e-6)


def test_scores_are_added_once_to_a_copy_and_by_initialize():
    section = golden.pruned("sparse_pruning", 0.5, ["attention.self"], "topk")
    config, model = TrainingConfig.of(TRAINED | {"compression_training": section}), filled(Bert())
    scored = config.with_scores(model)
    names = [name for name, _ in scored.named_parameters() if name.endswith("_scores")]
    assert len(names) == 3 * golden.LAYERS and not any("scores" in name for name, _ in model.named_parameters())
    again = config.with_scores(scored)
    assert list(dict(again.named_parameters())) == list(dict(scored.named_parameters()))
    square = lambda model, x: model(x).square().sum()
    step, state, _, _ = fds.initialize(model.train(), square, config=TRAINED | {"compression_training": section})
    new, _ = step(state, golden.TOKENS)
    assert not torch.equal(new.params[names[0]], state.params[names[0]])


@pytest.mark.parametrize(
    ("section", "where"),
    [
        (weights(8, ["attention.self", "self.query"]), "weight_quantization.different_groups.wq1.modules"),
        (
            groups((8, ["attention"]), (4, ["output"]), cut=1, in_forward=True),
            "weight_quantization.different_groups.wq2.modules",
        ),
        (weights(8, ["attention("]), "weight_quantization.different_groups.wq1.modules"),
        (weights(8, ["LayerNorm"]), "weight_quantization.different_groups.wq1.modules"),
        (weights(8, ["nothing"]), "weight_quantization.different_groups.wq1.modules"),
        (
            golden.pruned("row_pruning", 0.5, ["intermediate.dense"], related=[["layer.0.output.dense"]]),
            "row_pruning.different_groups.p1.related_modules",
        ),
        (
            golden.pruned("row_pruning", 0.5, ["intermediate.dense"], related=[["nothing"]]),
            "row_pruning.different_groups.p1.related_modules",
        ),
        (golden.pruned("channel_pruning", 0.5, ["dense"]), "channel_pruning.different_groups.p1.modules"),
        (
            groups((8, LINEAR), cut=1, in_forward=False),
            "weight_quantization.shared_parameters.quantize_weight_in_forward, fp16.enabled",
        ),
    ],
)
def test_groups_that_deepspeed_refuses_are_refused_with_their_paths(section, where):
    with pytest.raises(ConfigError) as refused:
        composed(filled(Bert()), section)
    assert refused.value.where == f"compression_training.{where}" and refused.value.want


def test_groups_that_name_nothing_are_refused_and_all_modules_are_a_group():
    with pytest.raises(ConfigError, match="a group names no module") as refused:
        composed(filled(Bert()), weights(8, ["attention.itself"]))
    assert "bert.encoder.*" in refused.value.hint or "bert.*" in refused.value.hint
    section = weights(8, [])
    del section["weight_quantization"]["different_groups"]["wq1"]["modules"]
    step, _ = composed(filled(Bert()), section)
    assert "'bert.encoder.layer.*.intermediate.dense.weight'" in str(step.composition)
    assert str(step.composition).count("quantize_weights") == 2  # linear layers, and embeddings by rows
    listed, _ = composed(filled(Bert()), weights(8, ["*"]))
    assert str(listed.composition) == str(step.composition)


def test_weights_are_rounded_where_they_are_used_as_the_key_says():
    losses = []
    for rounding in ("nearest", "stochastic"):
        step, state = composed(filled(Bert()), weights(4, ["attention.self"], rounding=rounding))
        losses.append(step(state, golden.TOKENS)[1]["loss"])
        again = step(state, golden.TOKENS)[1]["loss"]
        assert torch.equal(again, losses[-1])  # a function of the state
    assert not torch.equal(*losses)


def test_a_weight_of_one_bit_is_not_pruned_by_size():
    both = weights(1, ["attention.self"]) | golden.pruned("sparse_pruning", 0.5, ["self.query"])
    with pytest.raises(ConfigError, match="a weight of one bit is never zero"):
        composed(filled(Bert()), both)
    rows = weights(1, ["intermediate"]) | golden.pruned("row_pruning", 0.5, ["intermediate.dense"])
    with pytest.raises(ConfigError, match="a weight of one bit is never zero"):
        composed(filled(Bert()), rows)
    composed(filled(Bert()), weights(2, ["attention.self"]) | golden.pruned("sparse_pruning", 0.5, ["self.query"]))
    shifted = weights(4, ["attention.self"], kind="asymmetric")
    with pytest.raises(ConfigError, match="shifted grid may have no zero"):
        composed(filled(Bert()), shifted | golden.pruned("sparse_pruning", 0.5, ["self.query"]))
    by_scores = weights(1, ["attention.self"]) | golden.pruned("sparse_pruning", 0.5, ["self.query"], "topk")
    text = str(composed(filled(Bert()), by_scores)[0].composition)  # whose masks are of what is rounded
    assert text.index("quantize_weights") < text.index("prune_weights")


def test_modules_are_read_from_the_model_and_guessed_for_a_reader():
    config = TrainingConfig.of(TRAINED | {"compression_training": weights(8, REST)})
    with pytest.raises(ConfigError, match="nobody knows which modules are meant"):
        config.transforms(fds.mesh(dp=1))
    assert "fds.quantize_weights('*intermediate*.weight', '*layer.*.output.dense*.weight')" in config.explain({"dp": 1})
    layers = fds.Layers([nn.Linear(4, 4), torch.tanh, nn.Linear(4, 2)], nn.MSELoss())
    section = weights(8, ["0", "2"], groups=2)
    step, state, _, _ = fds.initialize(layers, config=TRAINED | {"compression_training": section})
    assert "quantize_weights('*.weight', groups=2)" in str(step.composition)
    step(state, (torch.ones(2, 4), torch.ones(2, 2)))
