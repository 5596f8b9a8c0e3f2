"""ZeRO++ as a JSON asks for it: what composing by hand gives, in nodes that `initialize` makes by itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fds
from fds import transports
from fds.config import TrainingConfig
from fds.errors import ConfigError
from tests.bits import assert_same_bits

ZERO: dict[str, Any] = {"stage": 3, "stage3_param_persistence_threshold": 0, "reduce_bucket_size": 100}
KEYS: dict[str, Any] = {"zero_hpz_partition_size": 2, "zero_quantized_weights": True, "zero_quantized_gradients": True}


def said(**zero: Any) -> dict[str, Any]:
    return {
        "train_batch_size": 16,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.05}},
        "zero_optimization": {**ZERO, **zero},
    }


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 3))


def loss(module: nn.Module, batch: Any) -> Tensor:
    return (module(batch[0]) - batch[1]).square().mean()


ROWS = torch.linspace(-1, 1, 64).view(16, 4), torch.linspace(0, 1, 48).view(16, 3).square()


def two_steps(step: Any, state: Any) -> tuple[Any, ...]:
    data = step.shard.data
    for _ in range(2):
        with fds.collectives.counted() as traffic:
            state, metrics = step(state, [x.chunk(data.size)[data.index] for x in ROWS])
    told = step.describe(state)
    return state, metrics, dict(traffic.counts), told.sent, told.num_bytes


def by_json(zero: dict[str, Any], ranks: int, axes: dict[str, int] | None = None) -> list[tuple[Any, ...]]:
    def run() -> tuple[Any, ...]:
        mesh = None if axes is None else fds.mesh(**axes)
        step, state, _, _ = fds.initialize(model(), loss, config=said(**zero), mesh=mesh)
        return two_steps(step, state)

    return fds.simulate(run, ranks)


def by_hand(*names: str, ranks: int = 4, **ways: Any) -> list[tuple[Any, ...]]:
    """Return the same of a composition on two axes, or one of them alone; a way may be a function of the mesh."""

    def run() -> tuple[Any, ...]:
        mesh = fds.mesh(**dict(zip(names, (2, 2) if len(names) == 2 else (ranks,), strict=True)))
        made = {name: way(mesh) if callable(way) else way for name, way in ways.items()}
        step = fds.compose(
            fds.accumulate(2),
            fds.shard_optimizer(mesh[names], stage=3, bucket_bytes=400, persist_below=1, **made),
            fds.precision(torch.bfloat16, accumulate=torch.bfloat16),
            fds.skip_nonfinite(),
            fds.clip_by_global_norm(1.0),
            fds.adamw(0.05, weight_decay=0.0),
        )(lambda params, batch: loss(apply(params), batch))
        apply, params = bound(model())
        return two_steps(step, step.init(params, key=0))

    return fds.simulate(run, ranks)


def assert_same_runs(got: list[tuple[Any, ...]], want: list[tuple[Any, ...]]) -> None:
    """Hold states and metrics bit for bit, and what was sent and held."""
    for one, other in zip(got, want, strict=True):
        assert_same_bits(one[:2], other[:2])
        assert one[2:] == other[2:]


def bound(module: nn.Module) -> tuple[Any, dict[str, Tensor]]:
    run, params, _ = fds.functional(module)
    return lambda params: lambda x: run(params, x), params


IN_8 = transports.quantized(8)
IN_4 = transports.quantized(4)


@pytest.mark.parametrize(
    ("zero", "ways"),
    [
        (KEYS, {"weights": True, "gradients": True, "secondary": True}),
        ({"zero_hpz_partition_size": 2}, {"secondary": True}),
        ({"zero_hpz_partition_size": 2, "zero_quantized_weights": True}, {"weights": True, "secondary": True}),
    ],
    ids=["all", "hpz", "hpz and weights"],
)
def test_a_json_of_zeropp_is_the_composition_by_hand_bit_for_bit(zero, ways):
    """Without a mesh as with one, and with every gradient in 4 bits: the bytes by axis are those too."""
    hand = {
        "weights": transports.hierarchical(IN_8),
        "gradients": transports.hierarchical(IN_4),
        "secondary": lambda mesh: mesh["dp"],
    }
    want = by_hand("node", "dp", **{name: hand[name] for name in ways})
    assert_same_runs(by_json(zero, 4), want)
    assert_same_runs(by_json(zero, 4, {"node": 2, "dp": 2}), want)


def test_without_nodes_messages_are_sent_in_one_hop():
    zero = KEYS | {"zero_hpz_partition_size": 8}
    assert_same_runs(by_json(zero, 2), by_hand("dp", ranks=2, weights=IN_8, gradients=IN_4))


def test_at_other_stages_the_keys_change_nothing_and_explain_names_them():
    assert_same_runs(by_json({"stage": 2, **KEYS}, 2), by_json({"stage": 2}, 2))
    config = TrainingConfig.of(said(**KEYS) | {"zero_optimization": {"stage": 2, **KEYS}})
    told = config.explain({"dp": 2})
    assert all(f"#   zero_optimization.{name} = " in told.partition("without effect here")[2] for name in KEYS)


def test_ranks_that_cannot_be_divided_into_nodes_are_told_so():
    with pytest.raises(ConfigError, match="another size") as e:
        fds.simulate(lambda: fds.initialize(model(), loss, config=said(zero_hpz_partition_size=3)), 4)
    assert e.value.where == "zero_optimization.zero_hpz_partition_size" and e.value.got == "3, and the mesh has 4"


def test_weights_beyond_float16_arrive_and_the_largest_is_exact():
    params = {"w": torch.tensor([1e6, -3e5, 7.0, 0.0])}
    config = TrainingConfig.of(
        {"train_batch_size": 2, "zero_optimization": {**ZERO, "zero_quantized_weights": True}}
        | {"optimizer": {"type": "SGD", "params": {"lr": 0.0}}}
    )

    def run() -> float:
        seen = lambda params, batch: (params["w"].amax() + 0 * batch.sum(), {"all": params["w"].abs().sum()})
        step = fds.compose(*config.transforms(fds.mesh(dp=2)))(seen)
        return float(step.evaluate(step.init(params), torch.zeros(1))["loss"])

    assert all(abs(found - 1e6) <= 1e6 * 2**-23 for found in fds.simulate(run, 2))


def test_the_dtype_of_messages_of_a_sequence_says_nothing_without_one():
    data = said() | {"seq_parallel_communication_data_type": "bf16"}
    assert "seq_parallel_communication_data_type = 'bf16'" in TrainingConfig.of(data).explain({"dp": 2})
    assert str(TrainingConfig.of(data).transforms(fds.mesh(dp=1))) == str(
        TrainingConfig.of(said()).transforms(fds.mesh(dp=1))
    )


def test_frozen_weights_of_a_json_are_the_same_codes_on_any_number_of_ranks():
    """In bfloat16 and of a small matrix, neither of which DeepSpeed does; bit for bit the composition by hand."""

    def frozen() -> nn.Module:
        module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 32), nn.Linear(32, 3))
        with torch.no_grad():
            for i, p in enumerate(module.parameters()):
                p.copy_(torch.linspace(-1, 1, p.numel()).view(p.shape) / (i + 1))
        module[2].requires_grad_(False)
        return module

    def run() -> Any:
        zero = {"zero_quantized_nontrainable_weights": True}
        step, state, _, _ = fds.initialize(frozen(), loss, config=said(**zero))
        before = step.params(state)
        _, metrics, *_ = two_steps(step, state)
        apply, params = bound(frozen())
        hand = fds.compose(
            fds.accumulate(2),
            fds.shard_optimizer(step.shard.data, stage=3, bucket_bytes=400, persist_below=1),
            fds.freeze("2.*"),
            fds.quantize_frozen(),
            fds.precision(torch.bfloat16, accumulate=torch.bfloat16),
            fds.skip_nonfinite(),
            fds.clip_by_global_norm(1.0),
            fds.adamw(0.05, weight_decay=0.0),
        )(lambda params, batch: loss(apply(params), batch))
        assert_same_bits(metrics, two_steps(hand, hand.init(params, key=0))[1])
        return before

    two, four = (fds.simulate(run, n)[0] for n in (2, 4))
    assert_same_bits(four, two)
    assert not torch.equal(two["2.weight"], frozen()[2].weight)
