"""What a configuration comes to, in words: a program that runs, and comments that say what is where and why."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import fds
from fds.config import TrainingConfig
from fds.errors import ComposeError, ConfigError, MeshError

LOSS = fds.Layers([nn.Linear(4, 8), torch.tanh, nn.Linear(8, 3)], nn.MSELoss())
ADAM = {"optimizer": {"type": "AdamW", "params": {"lr": 3e-4}}}
BF16 = {"bf16": {"enabled": True}}
ALL: dict[str, Any] = {
    "train_batch_size": 48,
    "gradient_accumulation_steps": 3,
    **BF16,
    "steps_per_print": 10,
    "optimizer": {"type": "Adam", "params": {"lr": "auto"}},
    "scheduler": {"type": "WarmupLR"},
    "zero_optimization": {
        "stage": 3,
        "contiguous_gradients": False,
        "stage3_prefetch_bucket_size": "auto",
        "mics_hierarchical_params_gather": True,
        "elastic_checkpoint": True,
    },
    "hybrid_engine": {"enabled": True},
}
SOME: dict[str, Any] = {key: value for key, value in ALL.items() if key != "hybrid_engine"} | {
    "zero_optimization": {"stage": 2, "contiguous_gradients": False}
}
TITLES = [
    "batch",
    "not supported yet: these keys are refused, and left out above",
    "bytes on each rank, P parameters",
    "defaults in force, of edition 0.19.6",
    '"auto" without a value: the default',
    "taken by other calls",
    "not applicable",
]


def explained(said: dict[str, Any], axes: Any = None, **arguments: Any) -> str:
    return TrainingConfig.of(said, **arguments).explain({"dp": 2} if axes is None else axes)


def sections(text: str) -> dict[str, list[str]]:
    """Return title -> lines of what stands below the program."""
    out: dict[str, list[str]] = {}
    title = ""
    for line in text[text.index("\n# batch\n") :].splitlines():
        if line.startswith("#   "):
            out[title].append(line.removeprefix("#   "))
        elif line:
            title = line.removeprefix("# ")
            out[title] = []
    return out


def test_all_parts_stand_in_one_order():
    assert list(sections(explained(ALL))) == TITLES


def test_a_part_with_nothing_to_say_is_not_there():
    said = {
        "train_batch_size": 2,
        "gradient_clipping": 0,
        "optimizer": {
            "type": "SGD",
            "params": {"lr": 0.1, "momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0, "nesterov": False},
        },
    }
    assert list(sections(explained(said))) == ["batch", "bytes on each rank, P parameters", "taken by other calls"]


@pytest.mark.parametrize("said", [ALL, SOME, {"train_batch_size": 48}, SOME | {"fp16": {"enabled": False}}], ids=str)
def test_all_but_the_program_is_comment(said):
    program, _, below = explained(said).partition("\n# batch\n")
    assert all(not line or line.startswith("#") for line in below.splitlines())
    assert program.startswith("import fds\n")


@pytest.mark.parametrize(
    ("axes", "num_ranks"),
    [({"dp": 2}, 2), ({"replicate": 2, "dp": 2}, 4), ({"pp": 2, "dp": 2}, 4), ({"pp": 2, "replicate": 2, "dp": 1}, 4)],
    ids=str,
)
def test_the_whole_text_runs_and_makes_the_composition(axes, num_ranks):
    config = TrainingConfig.of(SOME)

    def run() -> None:
        mesh = fds.mesh(**axes)
        text = config.explain(mesh)
        assert text == config.explain(axes)
        names: dict[str, Any] = {"loss_fn": LOSS}
        exec(text, names)
        assert repr(fds.compose(*names["step"].composition)) == repr(fds.compose(*config.transforms(mesh)))
        assert names["mesh"].shape == axes

    fds.simulate(run, num_ranks)


def test_without_an_optimizer_it_says_where_one_goes_and_its_learning_rate():
    rate = {"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.1}}}
    said = {"train_batch_size": 2}
    ends = ")(loss_fn)\n# an optimizer of your own goes last; its learning rate:\n# "
    assert ends + "a number or a schedule\n\n# batch" in explained(said)
    text = explained(said | rate, {"dp": 1})
    assert ends + "fds.schedules.delayed(fds.schedules.warmup(0.1, kind='log'))\n\n# batch" in text
    with pytest.raises(ComposeError, match="the composition has no optimizer"):
        exec(text, {"loss_fn": LOSS})


@pytest.mark.parametrize(
    ("axes", "arithmetic", "share"),
    [
        ({"dp": 2}, "8 rows x 3 microbatches x 2 data ranks", 24),
        ({"replicate": 2, "dp": 2}, "4 rows x 3 microbatches x 4 data ranks", 12),
        ({"pp": 4, "dp": 2}, "8 rows x 3 microbatches x 2 data ranks", 24),
        ({"dp": 1}, "16 rows x 3 microbatches x 1 data ranks", 48),
    ],
    ids=str,
)
def test_the_batch_is_told_as_a_product(axes, arithmetic, share):
    assert sections(explained(ALL, axes))["batch"][:2] == [
        f"train_batch_size 48 = {arithmetic}",
        f"a rank passes {share} rows to each call of the step",
    ]


def test_clipping_at_1_is_told_where_nobody_said_it():
    defaults = "defaults in force, of edition 0.19.6"
    assert sections(explained({"train_batch_size": 2}))[defaults] == ["gradient_clipping = 1.0"]
    assert defaults not in sections(explained({"train_batch_size": 2, "gradient_clipping": 1.0}))


def test_defaults_are_told_where_they_count_with_what_the_documentation_says():
    told = sections(explained(ALL))["defaults in force, of edition 0.19.6"]
    assert "optimizer.params.weight_decay = 0.0" in told and "bf16.check_grad_overflow = true" in told
    assert "scheduler.params.warmup_max_lr = null (the documentation says 0.001)" in told
    assert "zero_optimization.stage3_param_persistence_threshold = 100000 (the documentation says 1000000)" in told
    assert "optimizer.params.lr = 0.001" in told  # it was "auto"
    assert not [line for line in told if line.startswith(("fp16", "amp", "torch_autocast"))]
    other = sections(explained(SOME))["defaults in force, of edition 0.19.6"]
    assert not [line for line in other if "stage3_" in line]


def test_the_edition_of_the_documentation_does_not_say_that_it_differs_from_itself():
    told = sections(explained(ALL, defaults="docs"))["defaults in force, of edition docs"]
    assert [line for line in told if line.startswith("zero_optimization.stage3_param_persistence_threshold = 1000000")]
    assert not [line for line in told if "the documentation says" in line]


def test_what_is_not_there_is_told_and_left_out():
    told = sections(explained(ALL))[TITLES[1]]
    assert [line.split(": ")[0] for line in told] == [
        "zero_optimization.mics_hierarchical_params_gather",
        "hybrid_engine.enabled",
    ]
    assert TITLES[1] not in sections(explained(SOME))


def test_an_optimizer_that_is_not_there_leaves_the_program_without_one():
    said = {"train_batch_size": 2, "optimizer": {"type": "Muon"}}
    program, _, _ = explained(said).partition("\n# batch\n")
    assert "adam" not in program.replace("an optimizer of your own", "")
    assert "# an optimizer of your own goes last" in program


def test_keys_of_other_calls_and_without_meaning_are_told_with_why():
    told = sections(explained(ALL))
    assert told["not applicable"] == [
        "zero_optimization.contiguous_gradients = false: gradients are written into flat buckets in the first place"
    ]
    first, second, third = told["taken by other calls"]
    assert first.startswith("train_batch_size = 48: fds.data.DistributedLoader(dataset, batch_size)")
    assert second.startswith("zero_optimization.elastic_checkpoint = true: fds.load(dir, step, params)")
    assert third == "steps_per_print = 10: config.monitor(mesh): by fds.monitors.Console(every=)"


def test_autos_that_nobody_filled_are_told():
    told = sections(explained(ALL))['"auto" without a value: the default']
    assert told == ["optimizer.params.lr", "zero_optimization.stage3_prefetch_bucket_size"]
    filled = TrainingConfig.of(ALL).resolve(world_size=2, auto={"optimizer.params.lr": 0.5})
    text = filled.explain({"dp": 2})
    assert '"auto"' not in text and "fds.schedules.warmup(0.5, kind='log')" in text


@pytest.mark.parametrize(
    ("stage", "expected"),
    [
        (0, ["master weights and optimizer state: 12 P", "16-bit parameters: 2 P", "sums of gradients: 2 P"]),
        (
            1,
            [
                "master weights and optimizer state, among 4 ranks: 3 P",
                "whole parameters: 2 P",
                "sums of gradients: 2 P",
            ],
        ),
        (
            2,
            [
                "master weights and optimizer state, among 4 ranks: 3 P",
                "whole parameters: 2 P",
                "sums of gradients, among 4 ranks: 0.5 P",
                "two buckets of gradients: 2 P, at most 33,554,432",
            ],
        ),
        (
            3,
            [
                "master weights and optimizer state, among 4 ranks: 3 P",
                "parameters that are whole at once, beside small ones: 2 P, at most 50,331,648",
                "sums of gradients, among 4 ranks: 0.5 P",
                "two buckets of gradients: 2 P, at most 33,554,432",
            ],
        ),
    ],
)
def test_memory_is_told_by_formula(stage, expected):
    said = {"train_batch_size": 48, **BF16, **ADAM, "zero_optimization": {"stage": stage}}
    assert sections(explained(said, {"dp": 4}))["bytes on each rank, P parameters"] == expected


def test_memory_is_told_in_bytes_for_a_number_of_parameters_and_for_the_stages_of_a_pipeline():
    config = TrainingConfig.of({"train_batch_size": 48, **ADAM, "zero_optimization": {"stage": 1}})
    whole = sections(config.explain({"dp": 4}, num_parameters=10**9))["bytes on each rank, P parameters"]
    assert whole == [
        "master weights and optimizer state, among 4 ranks: 3 P = 3,000,000,000",
        "whole parameters: 4 P = 4,000,000,000",
        "sums of gradients: 4 P = 4,000,000,000",
    ]
    half = sections(config.explain({"pp": 2, "dp": 4}, num_parameters=10**9))
    assert half["bytes on each rank, P parameters of its stage"][0] == (
        "master weights and optimizer state, among 4 ranks: 3 P = 1,500,000,000"
    )
    copied = sections(config.explain({"replicate": 8, "dp": 2}))["bytes on each rank, P parameters"]
    assert copied[0] == "master weights and optimizer state, among 2 ranks: 6 P"


def test_what_cannot_be_composed_cannot_be_explained():
    with pytest.raises(ConfigError, match="do not multiply"):
        explained({"train_batch_size": 3})
    with pytest.raises(ConfigError, match="the batch size is not known"):
        explained({})
    with pytest.raises(ConfigError, match='a value is "auto", and nobody gave it'):
        explained({"train_batch_size": "auto"})
    with pytest.raises(MeshError, match="no axis for data ranks"):
        explained({"train_batch_size": 2}, {"pp": 2})


WITHOUT = "given, without effect here"


def test_keys_of_groups_of_compression_are_told_with_those_that_must_be_there(tmp_path):
    bits = {"start_bits": 8, "target_bits": 4, "quantization_period": 7}
    shared = {"enabled": True, "quantize_weight_in_forward": True}
    groups = {"a.b": {"params": bits, "modules": ["fc"]}}
    weights = {"weight_quantization": {"shared_parameters": shared, "different_groups": groups}}
    said = {"train_batch_size": 2, **ADAM, "compression_training": weights}
    path = "compression_training.weight_quantization.different_groups.a.b.params"
    assert sections(explained(said))[WITHOUT] == [f"{path}.start_bits = 8", f"{path}.quantization_period = 7"]
    shared["quantize_weight_in_forward"] = False
    assert WITHOUT not in sections(explained(said | {"fp16": {"enabled": True}}))


def test_a_model_is_read_for_the_names_of_what_is_compressed():
    groups = {"a": {"params": {"start_bits": 4, "target_bits": 4}, "modules": ["fc"]}}
    shared = {"enabled": True, "quantize_weight_in_forward": True}
    weights = {"weight_quantization": {"shared_parameters": shared, "different_groups": groups}}
    config = TrainingConfig.of({"train_batch_size": 2, **ADAM, "compression_training": weights})
    model = nn.ModuleDict({"fc": nn.Linear(2, 2), "of_fc": nn.Embedding(2, 2), "head": nn.Linear(2, 2)})
    guessed, read = config.explain({"dp": 1}), config.explain({"dp": 1}, model=model)
    assert "quantize_weights('*fc*.weight', bits=4)" in guessed and "are guessed" in guessed
    assert "quantize_weights('fc.weight', bits=4)" in read and "guessed" not in read
    assert "quantize_weights('of_fc.weight', bits=4, groups='rows')" in read
    names: dict[str, Any] = {"loss_fn": LOSS}
    exec(read, names)
    assert list(map(str, names["step"].composition)) == list(map(str, config.transforms(fds.mesh(dp=1), model=model)))
    with pytest.raises(ConfigError, match="names no module"):
        config.explain({"dp": 1}, model=nn.Linear(2, 2))
    with pytest.raises(ComposeError, match="not a module"):
        config.explain({"dp": 1}, model="fc")


def test_keys_that_make_others_superfluous_are_in_effect_together():
    sizes = {"train_batch_size": 16, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2}
    text = explained(sizes | {"zero_optimization": {"stage": 2, "sub_group_size": 5}})
    assert "fds.accumulate(2)" in text and "zero_optimization.sub_group_size = 5" in text
    assert WITHOUT not in sections(explained(sizes))
    buckets = {"stage": 2, "reduce_bucket_size": 1000, "allgather_bucket_size": 1000}
    assert WITHOUT not in sections(explained({"train_batch_size": 16, "zero_optimization": buckets}))
    said = sizes | {"zero_optimization": {"stage": 2, "stage3_max_live_parameters": 5}}
    assert sections(explained(said))[WITHOUT] == ["zero_optimization.stage3_max_live_parameters = 5"]
    once = {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 1}
    assert sections(explained(once))[WITHOUT] == ["gradient_accumulation_steps = 1"]
