"""Tensor, sequence and expert parallelism: how many ranks share a tensor, a sequence, or the experts of a layer.

Source: `runtime/tensor_parallel/config.py`, `module_inject/auto_ep_config.py` and `__init__.py` of 0.19.6.
"""

from __future__ import annotations

from typing import Any, Literal

import attrs

from fds.config.contradiction import check_order, contradiction
from fds.config.field import AUTO, key
from fds.config.meaning import Elsewhere, NotApplicable, NotYet, PartOf, argument
from fds.config.record import Config, within
from fds.errors import ConfigError

_TP = PartOf("autotp_size")
_RULE = PartOf("partition_config")
_OBJECT = NotApplicable("ranks are those of a mesh, whose axes are passed to transforms")
_INFERENCE = NotApplicable("0.19.6 reads it for inference only")
_OWN_RULES = NotYet("rules of one's own, which fds.tensor_parallel takes as a plan", nothing=(None,))


@attrs.frozen
class ParallelSizesConfig(Config):
    """Keys of the top level on the layout of ranks."""

    data_parallel_size: int | None = key(
        None,
        "ranks that take different rows; with the next key it makes the mesh",
        Elsewhere("fds.mesh(dp=...)"),
        unit="ranks",
        over=0,
    )
    sequence_parallel_size: int | None = key(
        None,
        "ranks that share the tokens of a row",
        Elsewhere("fds.mesh(sp=...)", "over it `fds.context_parallel`; a rank passes its contiguous part of every row"),
        unit="ranks",
        over=0,
    )
    use_data_before_expert_parallelism: bool = key(
        False,
        "let neighbouring ranks differ in data, not in experts",
        Elsewhere("fds.mesh(...)", "neighbours differ in the axis that is named last"),
    )


@attrs.frozen
class TensorParallelRanksConfig(Config):
    """`tp` of tensor parallelism."""

    tp_size: int = key(1, "ranks that share a layer, as checked against `autotp_size`", _TP, unit="ranks", over=0)
    tp_grain_size: int = key(1, "slices of a layer are multiples of this", _INFERENCE, unit="elements", over=0)
    mpu: Any = key(None, "object that knows the groups of ranks", _OBJECT)
    tp_group: Any = key(None, "group of the ranks that share a layer", _OBJECT)


@attrs.frozen
class TensorRuleConfig(Config):
    """One of `layer_specs`: how parameters with matching names are split."""

    patterns: tuple[str, ...] = key((), "regular expressions for names of parameters", _RULE)
    partition_type: Literal["column", "row", "skip"] = key(
        "column", "share outputs, share inputs, or give each rank all", _RULE
    )
    shape: Any = key(
        None, "the parameter is viewed so first; -1 is inferred, a list in a list is of uneven parts", _RULE
    )
    partition_dim: int | None = key(None, "dim of that which is shared; null: 0 for column, 1 for row", _RULE, low=0)
    model_types: tuple[str, ...] | None = key(None, "architectures that the rule is for; null: all", _RULE)
    gather_output: bool = key(False, "give each rank all outputs", _RULE)
    grad_allreduce: bool = key(False, "sum gradients of what each rank has all of", _RULE)


@attrs.frozen
class TensorPartitionConfig(Config):
    """`partition_config`: which dim of which parameter is split."""

    use_default_specs: bool = key(True, "add these to the preset's rules, not replace them", _RULE)
    layer_specs: tuple[dict[str, Any], ...] = key(
        (), "rules, the first that matches a parameter counts; each has the keys of `TensorRuleConfig`", _RULE
    )
    tp_size: int = key(1, "nothing: `autotp_size` replaces it", NotApplicable("`autotp_size` replaces it"), over=0)
    embedding_partition_dim: int = key(1, "dim of an embedding that is shared", _RULE)
    lm_head_patterns: tuple[str, ...] = key(("lm_head", "embed_out"), "names of the output layer", _RULE)
    strict_mode: bool = key(False, "refuse linear layers that no rule is for", _RULE)

    def check(self) -> None:
        """Raise `ConfigError` for an invalid rule."""
        for i, rule in enumerate(() if self.layer_specs == AUTO else self.layer_specs):
            with within(f"layer_specs.{i}."):
                TensorRuleConfig.from_dict(rule)


@attrs.frozen
class TensorParallelConfig(Config):
    """`tensor_parallel`: layers are split by name."""

    autotp_size: int = key(
        0,
        "ranks that share a layer; 0 and 1: none",
        argument("tensor_parallel", note='over mesh["tp"], by the plan "auto"'),
        unit="ranks",
        low=0,
    )
    tp_overlap_comm: bool = key(
        False, "send while computing", argument("tensor_parallel", name="overlap", note="true is 1, the same bits")
    )
    tp: TensorParallelRanksConfig = key(
        TensorParallelRanksConfig, "the ranks that share a layer", old=("tensor_parallel",)
    )
    preset_model: str | None = key(
        None,
        "architecture whose rules are built in",
        NotApplicable("a plan follows from the modules themselves; those that are not known are refused"),
    )
    partition_config: TensorPartitionConfig | None = key(None, "rules of one's own", _OWN_RULES)
    dtype: Literal["torch.float16"] = key("torch.float16", "type of the sliced parameters", _INFERENCE)
    injection_policy_tuple: tuple[Any, ...] | None = key(None, "modules whose output is summed", _INFERENCE)
    keep_module_on_host: bool = key(False, "slice in the host's memory", _INFERENCE)
    kernel_inject: bool = key(False, "use inference kernels", _INFERENCE, old=("replace_with_kernel_inject",))

    @property
    def enabled(self) -> bool:
        """Whether layers are split."""
        return self.autotp_size == AUTO or self.autotp_size > 1

    def check(self) -> None:
        """Raise `ConfigError` for two sizes."""
        auto, size = self.autotp_size, self.tp.tp_size
        if AUTO not in (auto, size) and size > 1 and auto != size:
            raise contradiction(
                self,
                "a layer is shared by one number of ranks",
                "autotp_size",
                "tp.tp_size",
                want="the same number, or autotp_size alone",
            )


@attrs.frozen
class ExpertParallelConfig(Config):
    """`expert_parallel`: layers of experts are found in a model, and the experts shared among ranks."""

    enabled: bool = key(False, "share experts among ranks", NotYet("expert parallelism"))
    autoep_size: int = key(1, "ranks that share the experts of a layer", PartOf(), unit="ranks", over=0)
    expert_tensor_parallel_size: int = key(1, "ranks that share one expert", PartOf(), unit="ranks", over=0)
    validate_folding_routing: bool = key(False, "check at each step that ranks agree on tokens", PartOf())
    preset_model: str | None = key(None, "architecture whose names are built in", PartOf())
    moe_layer_pattern: str | None = key(None, "regular expression for layers of experts", PartOf())
    expert_pattern: str | None = key(None, "attribute of such a layer that holds the experts", PartOf())
    router_pattern: str | None = key(None, "attribute that holds the router", PartOf())
    use_grouped_mm: bool = key(True, "multiply all experts at once", PartOf())
    disable_triton_grouped_mm: bool = key(False, "without Triton", PartOf())
    route_norm: bool | None = key(
        None, "let the weights of a token's experts sum to one; null: as the preset", PartOf()
    )
    route_scale: float = key(1.0, "factor of the experts' output", PartOf())
    score_apply: Literal["auto", "pre", "post"] = key("auto", "scale what experts take, or what they give", PartOf())
    combine_impl: Literal["auto", "weighted_sum", "legacy_bmm"] = key("auto", "how outputs are added", PartOf())
    num_expert_groups: int | None = key(None, "groups of experts that are routed to as one", PartOf(), over=0)
    num_limited_groups: int | None = key(None, "groups that a token may go to", PartOf(), over=0)
    score_func: Literal["auto", "softmax", "sigmoid"] = key("auto", "how scores become weights", PartOf())
    top_k: int = key("auto", "experts that compute a token", PartOf(), over=0)
    load_balance_coeff: float | None = key(None, "weight of an auxiliary loss; 0.19.6 takes null only", PartOf())
    routed_scaling_factor: float = key("auto", "factor of routed experts' output", PartOf())
    expert_w1: str | None = key(None, "name of an expert's first weight; null: as the preset", PartOf())
    expert_w2: str | None = key(None, "name of its second", PartOf())
    expert_w3: str | None = key(
        None, "name of its third; absent: as the preset; null, given: the first holds it too", PartOf()
    )
    num_experts_attr: str | None = key(None, "attribute of the model's config that counts experts", PartOf())
    top_k_attr: str | None = key(None, "attribute of the model's config for top_k", PartOf())
    has_shared_experts: bool | None = key(None, "whether some experts compute all tokens", PartOf())
    shared_experts_pattern: str | None = key(None, "attribute that holds those", PartOf())
    shared_experts_gate_pattern: str | None = key(None, "attribute that weighs them", PartOf())

    def check(self) -> None:
        """Raise `ConfigError` for more groups than there are, and for a loss that 0.19.6 does not have."""
        check_order(self, "num_limited_groups", "num_expert_groups")
        if self.load_balance_coeff not in (None, AUTO):
            raise ConfigError(
                "0.19.6 has no auxiliary loss",
                where="load_balance_coeff",
                got=repr(self.load_balance_coeff),
                want="null",
            )
