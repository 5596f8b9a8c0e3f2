"""The optimizer and the learning rate's scheduler, and the parameters of each type.

An update uses the learning rate that the formula has for an earlier update, which is why compositions contain
`fds.schedules.delayed`.

Source: the constructors that DeepSpeed 0.19.6 calls.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fds.config.record import Config, within
from fds.config.rows import MissingKeyError, declare
from fds.errors import ConfigError

_TABLE = """
@carried: n/a: messages go where all others do: by NCCL between GPUs, else by gloo
@later: not yet but for -1: a schedule that begins later on
@never: n/a: 0.19.6 never applies it here, and fds does not

AdamConfig [adamw|adam(=)]: Parameters of `Adam` and `AdamW`: both are AdamW, unless Adam has `adam_w_mode` false.
    lr: float = 0.001; >= 0 | learning rate; a scheduler that names its own replaces it
    betas: tuple[float, float] = (0.9, 0.999) | decay of the running means of the gradient and of its square
    eps: float = 1e-8; >= 0 | added to the denominator
    weight_decay: float = 0.0; >= 0 | share of the parameter that an update takes away; absent under `torch_adam`:
        torch's (AdamW: 0.01)
    bias_correction: bool = True | divide the running means by 1 - beta^t
    adam_w_mode: bool = True | decay the parameters themselves (AdamW), not the gradient (L2) | adam(): if false
    torch_adam: bool = False | use torch's class | n/a: one formula; only the default of weight_decay follows it
    fp32_optimizer_states: bool|None = None | keep moments in float32 on the CPU | not yet but for None, True: 16-bit
        optimizer states
    amsgrad: bool = False | keep the maximum of the second moment | not yet: AMSGrad
    maximize: bool = False | climb instead of descend | not yet: maximizing: return the negative loss
    foreach: bool|None = None | torch's choice of implementation | n/a: fds takes torch's fused functions, or its own
        kernels where they are chosen
    fused: bool|None = None | torch's choice of implementation | n/a: fds takes torch's fused functions, or its own
        kernels where they are chosen
    set_grad_none: bool = True | drop gradients instead of zeroing them | n/a: gradients are values of one step; nothing
        is kept to be zeroed

LambConfig [lamb(=)]: Parameters of `Lamb`.
    = lr, betas
    eps: float = 1e-8; >= 0 | added to the denominator
    weight_decay: float = 0.0; >= 0 | share of the parameter that an update takes away
    bias_correction: bool = True | correct the step size for the start of the running means
    eps_inside_sqrt: bool = False | add eps under the root
    max_coeff: float = 10.0; >= 0 | upper bound of a parameter's trust ratio
    min_coeff: float = 0.01; >= 0 | lower bound of a parameter's trust ratio
    = amsgrad

LionConfig [lion(=)]: Parameters of `Lion`.
    = lr, betas, weight_decay, set_grad_none

AdagradConfig [adagrad(=)]: Parameters of `Adagrad`.
    lr: float = 0.01; >= 0 | learning rate; a scheduler that names its own replaces it
    lr_decay: float = 0.0; >= 0 | how fast the learning rate falls with t
    = weight_decay
    initial_accumulator_value: float = 0.0; >= 0 | what the sum of squares begins with
    eps: float = 1e-10; >= 0 | added to the denominator
    = maximize
    differentiable: bool = False | let gradients flow through the update | not yet: derivatives of an update
    = foreach, fused

SgdConfig [sgd(=)]: Parameters of torch's `SGD`.
    lr: float = 0.001; >= 0 | learning rate; a scheduler that names its own replaces it
    momentum: float = 0.0; >= 0 | decay of the running sum of gradients
    dampening: float = 0.0 | share of the gradient that the sum leaves out
    = weight_decay
    nesterov: bool = False | look ahead along the momentum
    = maximize, differentiable, foreach, fused

OneBitAdamConfig [onebit_adam(=)]: Parameters of `OneBitAdam`.
    = lr
    freeze_step: int = 100_000; steps; >= 0 | calls before compression begins, the first of which updates nothing | (=):
        one less, since ours updates in all of them
    = betas
    eps: float = 1e-8; >= 0 | added to the denominator
    = weight_decay
    bias_correction: bool = True | nothing | @never
    eps_inside_sqrt: bool = False | nothing | @never
    = amsgrad
    cuda_aware: bool = False | MPI sends GPU memory itself | @carried
    comm_backend_name: str = "nccl" | what carries the messages | @carried

ZeroOneAdamConfig [zero_one_adam(=)]: Parameters of `ZeroOneAdam`.
    = lr
    var_freeze_step: int = 100_000; steps; >= 0 | updates after which the variance stays | (=): at least 1
    var_update_scaler: int = 16; >= 1 | variance updates after which their interval doubles
    local_step_scaler: int = 32678; steps; >= 1 | updates after which the interval of local steps doubles
    local_step_clipper: int = 16; steps; >= 1 | longest interval of local steps
    = betas
    eps: float = 1e-8; >= 0 | added to the denominator
    = weight_decay
    bias_correction: bool = True | nothing | @never
    eps_inside_sqrt: bool = False | nothing | @never
    = amsgrad, cuda_aware, comm_backend_name

OneBitLambConfig [onebit_lamb(=)]: Parameters of `OneBitLamb`.
    = lr, freeze_step, betas
    eps: float = 1e-8; >= 0 | added to the denominator
    = weight_decay, max_coeff, min_coeff
    coeff_beta: float = 0.9; >= 0 | decay of the running mean of trust ratios
    factor_max: float = 4.0; >= 0 | upper bound of the correction of a frozen ratio
    factor_min: float = 0.5; >= 0 | lower bound of the correction of a frozen ratio
    factor_threshold: float = 0.1; >= 0 | bound of the correction's change between updates
    bias_correction: bool = True | nothing | @never
    eps_inside_sqrt: bool = False | nothing | @never
    = amsgrad, cuda_aware, comm_backend_name

MuonConfig [part of type]: Parameters of `Muon`, and of Adam for the parameters that are not matrices.
    lr: float|None = None; >= 0 | learning rate of both; null: 0.02 and 0.0003
    muon_lr: float|None = None; >= 0 | learning rate of matrices; null: `lr`
    adam_lr: float|None = None; >= 0 | learning rate of the others; null: `lr`
    momentum: float = 0.95; >= 0 | decay of the running mean of matrices' gradients
    ns_method: str = "gram" | how a matrix is made orthogonal
    betas: tuple[float, float] = (0.9, 0.95) | decay of the others' running means
    eps: float = 1e-10; >= 0 | added to the others' denominator
    weight_decay: float = 0.0; >= 0 | share of a parameter that an update takes away
    adam_w_mode: bool = True | decay the others themselves, not their gradient
    torch_adam: bool = False | use torch's Adam for the others
    fp32_optimizer_states: bool|None = None | keep moments in float32 on the CPU

OptimizerConfig:
    type: str|None = None | its name: one of DeepSpeed's own in any case, or a class of torch.optim |
        adamw|adam|lamb|lion|adagrad|sgd|onebit_adam|onebit_lamb|zero_one_adam(): which of them
    params: dict[str, Any] = {}; null as absent | what it is made with; below, per type | adamw(): below
    legacy_fusion: bool = False | an older way to flatten float16 parameters | n/a: parameters are flat buckets whenever
        they are sharded

WarmupLRConfig [schedules.warmup(=)]: Parameters of `WarmupLR`: warm-up, then constant.
    warmup_min_lr: float = 0.0; >= 0 | learning rate to begin with | (start=)
    warmup_max_lr: float|None = None; >= 0; docs 0.001 | learning rate to stay at; null: the optimizer's | (peak=)
    warmup_num_steps: int = 1000; steps; > 0 | updates of the warm-up | (warmup_steps=)
    warmup_type: Literal["log", "linear"] = "log" | how the warm-up rises | (kind=)
    last_batch_iteration: int = -1 | the update to begin with | @later

WarmupDecayLRConfig [schedules.warmup_decay(=)]: Parameters of `WarmupDecayLR`: warm-up, then linear decay to 0.
    total_num_steps: int|None = None; steps; > 0 | updates of the whole training; it must be given | (total_steps=)
    = warmup_min_lr
    warmup_max_lr: float = 0.001; >= 0 | highest learning rate | (peak=)
    = warmup_num_steps, warmup_type, last_batch_iteration

WarmupCosineLRConfig [schedules.warmup_cosine(=)]: Parameters of `WarmupCosineLR`: warm-up to the optimizer's learning
        rate, then cosine decay.
    = total_num_steps
    warmup_min_ratio: float = 0.0; >= 0 | share of the optimizer's rate to begin with | (start_ratio=)
    = warmup_num_steps
    cos_min_ratio: float = 0.0001; >= 0 | share of the optimizer's rate to end with | (end_ratio=)
    = warmup_type, last_batch_iteration

OneCycleConfig [schedules.one_cycle|schedules.one_cycle_momentum(=)]: Parameters of `OneCycle`: one cycle up and down,
        with the momentum opposite, then a slow decay.
    cycle_min_lr: float|None = None; >= 0 | learning rate at both ends; it must be given | schedules.one_cycle(min_lr=)
    cycle_max_lr: float|None = None; >= 0 | learning rate at the peak; it must be given | schedules.one_cycle(max_lr=)
    decay_lr_rate: float = 0.0; >= 0 | decay of the learning rate after the cycle | schedules.one_cycle(decay_rate=)
    cycle_first_step_size: int = 2000; steps; > 0 | updates of the climb | (first_steps=)
    cycle_second_step_size: int|None = None; steps; >= 0 | updates of the descent; null: as many | (second_steps=)
    cycle_first_stair_count: int = 0; >= 0 | stairs of the climb; 0: none | (first_stairs=)
    cycle_second_stair_count: int|None = None; >= 0 | stairs of the descent; null: as many | (second_stairs=)
    decay_step_size: int = 0; steps; >= 0 | updates per unit of the decay; 0: no decay | (decay_steps=)
    cycle_momentum: bool = True | let beta1 go against the learning rate, and beta2 be 0.99, where the optimizer has
        betas | adamw|adam|lamb|lion(betas=)
    cycle_min_mom: float = 0.8; >= 0; < 1 | beta1 at the peak | schedules.one_cycle_momentum(min_momentum=)
    cycle_max_mom: float = 0.9; >= 0; < 1 | beta1 at both ends | schedules.one_cycle_momentum(max_momentum=)
    decay_mom_rate: float = 0.0; >= 0 | growth of beta1 after the cycle | schedules.one_cycle_momentum(decay_rate=)
    = last_batch_iteration

LRRangeTestConfig [schedules.lr_range_test(=)]: Parameters of `LRRangeTest`: an unbounded increase, to find where
        training diverges.
    lr_range_test_min_lr: float = 0.001; >= 0 | learning rate to begin with | (start=)
    lr_range_test_step_size: int = 2000; steps; > 0 | updates per unit of the climb | (steps=)
    lr_range_test_step_rate: float = 1.0 | how much a unit adds, in units of the first rate | (rate=)
    lr_range_test_staircase: bool = False | climb in stairs | (staircase=)
    = last_batch_iteration

SchedulerConfig:
    type: str|None = None | its name |
        schedules.warmup|schedules.warmup_decay|schedules.warmup_cosine|schedules.one_cycle|schedules.lr_range_test():
        which of them
    params: dict[str, Any] = {} | what it is made with; below, per type | schedules.warmup(): below
"""


class OptimizerConfig(Config):
    """`optimizer`: its type and parameters."""

    def check(self) -> None:
        """Raise `ConfigError` for parameters that the optimizer does not take, or without an optimizer."""
        if self.kind is None and self.params:
            raise ConfigError(
                "parameters without an optimizer",
                where="type, params",
                got=f"null, {self.params!r:.60}",
                want=f"type: one of {', '.join(SPELLED.values())}",
            )
        if self.kind in OPTIMIZERS:
            if "max_grad_norm" in self.params:
                raise ConfigError(
                    "gradient clipping has its own key",
                    where="params.max_grad_norm",
                    got=repr(self.params["max_grad_norm"]),
                    want='"gradient_clipping" beside "optimizer"',
                )
            self.arguments  # noqa: B018 (evaluated for its checks)

    @property
    def kind(self) -> str | None:
        """The type, by its name in `OPTIMIZERS`."""
        return None if self.type is None else kind_of(self.type)

    @property
    def arguments(self) -> Any:
        """The parameters, as a record of the optimizer's type, which must be in `OPTIMIZERS`."""
        with within("params."):
            return OPTIMIZERS[str(self.kind)].from_dict(self.params, defaults=self.defaults)


class SchedulerConfig(Config):
    """`scheduler`: its type and parameters."""

    def check(self) -> None:
        """Raise `ConfigError` for unknown or missing parameters, or parameters without a scheduler."""
        if self.type is None and self.params:
            raise ConfigError(
                "parameters without a scheduler",
                where="type, params",
                got=f"null, {self.params!r:.60}",
                want=f"type: one of {', '.join(SCHEDULERS)}",
            )
        if self.type in SCHEDULERS:
            if not isinstance(self.params, Mapping):
                raise ConfigError(
                    "a group of keys is a JSON object", where="params", got=repr(self.params)[:80], want="{...}"
                )
            missing = [name for name in REQUIRED.get(self.type, ()) if self.params.get(name) is None]
            if missing:
                raise MissingKeyError(
                    "the scheduler lacks required parameters",
                    where=", ".join(f"params.{name}" for name in missing),
                    got=", ".join(f"{name}={self.params[name]!r}" for name in self.params) or "nothing",
                    want=", ".join(missing),
                )
            self.arguments  # noqa: B018 (evaluated for its checks)

    @property
    def arguments(self) -> Any:
        """The parameters, as a record of the scheduler's type, which must be in `SCHEDULERS`."""
        with within("params."):
            params = {name: _of_only_group(name, value) for name, value in self.params.items()}
            return SCHEDULERS[str(self.type)].from_dict(params, defaults=self.defaults)


def kind_of(type_: str) -> str:
    """Return the name of an optimizer in `OPTIMIZERS`: case matters for classes of torch.optim only.

    >>> kind_of("AdamW"), kind_of("SGD"), kind_of("sgd") in OPTIMIZERS
    ('adamw', 'SGD', False)
    """
    return type_ if type_ in OPTIMIZERS else type_.lower()


def _of_only_group(name: str, value: Any) -> Any:
    """Return the only item of a list with one value per parameter group, other values unchanged."""
    if name not in _BY_GROUP or not isinstance(value, list | tuple):
        return value
    if len(value) != 1:
        raise ConfigError(
            "a list has one number per parameter group, and a JSON has one group",
            where=name,
            got=f"{len(value)} numbers",
            want="a number",
            hint="groups with rates of their own: optimizer=fds.by_name({...})",
        )
    return value[0]


_RECORDS = declare(globals(), _TABLE)
SPELLED = {  # DeepSpeed's own in lower case; torch's as it is
    name if name == "SGD" else name.lower(): name
    for name in ("Adam", "AdamW", "Lamb", "Lion", "Adagrad", "SGD", "OneBitAdam", "ZeroOneAdam", "OneBitLamb", "Muon")
}
_OTHERS = {"adamw": "Adam", "SGD": "Sgd"}  # whose record is not called as they are
OPTIMIZERS: dict[str, type[Config]] = {
    kind: _RECORDS[f"{_OTHERS.get(kind, name)}Config"] for kind, name in SPELLED.items()
}
COMPRESSED = ("onebitadam", "zerooneadam", "onebitlamb")  # optimizers with compressed communication
NOT_YET = {"muon": "Muon by attributes of parameters: pass fds.by_name({...: fds.muon(...), ...})"}
SCHEDULERS: dict[str, type[Config]] = {
    name: _RECORDS[f"{name}Config"]
    for name in ("WarmupLR", "WarmupDecayLR", "WarmupCosineLR", "OneCycle", "LRRangeTest")
}
_BY_GROUP = (
    "warmup_min_lr",
    "warmup_max_lr",
    "cycle_min_lr",
    "cycle_max_lr",
    "cycle_min_mom",
    "cycle_max_mom",
    "lr_range_test_min_lr",
)


REQUIRED = {
    "WarmupDecayLR": ("total_num_steps",),
    "WarmupCosineLR": ("total_num_steps",),
    "OneCycle": ("cycle_min_lr", "cycle_max_lr"),
}
