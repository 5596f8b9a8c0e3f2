"""The optimizer, and the parameters of each type.

Source: the constructors that DeepSpeed 0.19.6 calls.
"""

from __future__ import annotations

from typing import Any

import attrs

from fds.config.field import key
from fds.config.meaning import Argument, NotApplicable, NotYet, PartOf, argument
from fds.config.record import Config, within
from fds.errors import ConfigError

_ADAM = ("adamw", "adam")
_FUNCTIONS = "adamw", "adam", "lamb", "lion", "adagrad", "sgd", "onebit_adam", "onebit_lamb", "zero_one_adam"
_TYPE = PartOf("type")
_FOREACH = NotApplicable("fds takes torch's fused functions, or its own kernels where they are chosen")

_NEVER_APPLIED = NotApplicable("0.19.6 never applies it here, and fds does not")
_CARRIED = NotApplicable("messages go where all others do: by NCCL between GPUs, else by gloo")


def _lr(default: float | None, *of: str) -> Any:
    return key(default, "learning rate; a scheduler that names its own replaces it", argument(*of, name="lr"), low=0)


def _betas(of: Argument, default: tuple[float, float] = (0.9, 0.999)) -> Any:
    return key(default, "decay of the running means of the gradient and of its square", of)


def _eps(default: float, *of: str) -> Any:
    return key(default, "added to the denominator", argument(*of, name="eps"), low=0)


def _weight_decay(default: float | None, *of: str) -> Any:
    return key(default, "share of the parameter that an update takes away", argument(*of, name="weight_decay"), low=0)


def _freeze_step(of: str) -> Any:
    return key(
        100000,
        "calls before compression begins, the first of which updates nothing",
        argument(of, name="freeze_step", note="one less, since ours updates in all of them"),
        unit="steps",
        low=0,
    )


def _amsgrad() -> Any:
    return key(False, "keep the maximum of the second moment", NotYet("AMSGrad"))


def _maximize() -> Any:
    return key(False, "climb instead of descend", NotYet("maximizing: return the negative loss"))


def _differentiable() -> Any:
    return key(False, "let gradients flow through the update", NotYet("derivatives of an update"))


@attrs.frozen
class AdamConfig(Config):
    """Parameters of `Adam` and `AdamW`: both are AdamW, unless Adam has `adam_w_mode` false."""

    lr: float = _lr(1e-3, *_ADAM)
    betas: tuple[float, float] = _betas(argument(*_ADAM, name="betas"))
    eps: float = _eps(1e-8, *_ADAM)
    weight_decay: float = key(
        0.0,
        "share of the parameter that an update takes away; absent under `torch_adam`: torch's (AdamW: 0.01)",
        argument(*_ADAM, name="weight_decay"),
        low=0,
    )
    bias_correction: bool = key(
        True, "divide the running means by 1 - beta^t", argument(*_ADAM, name="bias_correction")
    )
    adam_w_mode: bool = key(
        True, "decay the parameters themselves (AdamW), not the gradient (L2)", argument("adam", note="if false")
    )
    torch_adam: bool = key(
        False, "use torch's class", NotApplicable("one formula; only the default of weight_decay follows it")
    )
    fp32_optimizer_states: bool | None = key(
        None, "keep moments in float32 on the CPU", NotYet("16-bit optimizer states", nothing=(None, True))
    )
    amsgrad: bool = _amsgrad()
    maximize: bool = _maximize()
    foreach: bool | None = key(None, "torch's choice of implementation", _FOREACH)
    fused: bool | None = key(None, "torch's choice of implementation", _FOREACH)
    set_grad_none: bool = key(
        True,
        "drop gradients instead of zeroing them",
        NotApplicable("gradients are values of one step; nothing is kept to be zeroed"),
    )


@attrs.frozen
class LambConfig(Config):
    """Parameters of `Lamb`."""

    lr: float = _lr(1e-3, "lamb")
    betas: tuple[float, float] = _betas(argument("lamb", name="betas"))
    eps: float = _eps(1e-8, "lamb")
    weight_decay: float = _weight_decay(0.0, "lamb")
    bias_correction: bool = key(
        True, "correct the step size for the start of the running means", argument("lamb", name="bias_correction")
    )
    eps_inside_sqrt: bool = key(False, "add eps under the root", argument("lamb", name="eps_inside_sqrt"))
    max_coeff: float = key(10.0, "upper bound of a parameter's trust ratio", argument("lamb", name="max_coeff"), low=0)
    min_coeff: float = key(0.01, "lower bound of a parameter's trust ratio", argument("lamb", name="min_coeff"), low=0)
    amsgrad: bool = _amsgrad()


@attrs.frozen
class LionConfig(Config):
    """Parameters of `Lion`."""

    lr: float = _lr(1e-3, "lion")
    betas: tuple[float, float] = _betas(argument("lion", name="betas"))
    weight_decay: float = _weight_decay(0.0, "lion")
    set_grad_none: bool = key(
        True,
        "drop gradients instead of zeroing them",
        NotApplicable("gradients are values of one step; nothing is kept to be zeroed"),
    )


@attrs.frozen
class AdagradConfig(Config):
    """Parameters of `Adagrad`."""

    lr: float = _lr(1e-2, "adagrad")
    lr_decay: float = key(0.0, "how fast the learning rate falls with t", argument("adagrad", name="lr_decay"), low=0)
    weight_decay: float = _weight_decay(0.0, "adagrad")
    initial_accumulator_value: float = key(
        0.0, "what the sum of squares begins with", argument("adagrad", name="initial_accumulator_value"), low=0
    )
    eps: float = _eps(1e-10, "adagrad")
    maximize: bool = _maximize()
    differentiable: bool = _differentiable()
    foreach: bool | None = key(None, "torch's choice of implementation", _FOREACH)
    fused: bool | None = key(None, "torch's choice of implementation", _FOREACH)


@attrs.frozen
class SgdConfig(Config):
    """Parameters of torch's `SGD`."""

    lr: float = _lr(1e-3, "sgd")
    momentum: float = key(0.0, "decay of the running sum of gradients", argument("sgd", name="momentum"), low=0)
    dampening: float = key(0.0, "share of the gradient that the sum leaves out", argument("sgd", name="dampening"))
    weight_decay: float = _weight_decay(0.0, "sgd")
    nesterov: bool = key(False, "look ahead along the momentum", argument("sgd", name="nesterov"))
    maximize: bool = _maximize()
    differentiable: bool = _differentiable()
    foreach: bool | None = key(None, "torch's choice of implementation", _FOREACH)
    fused: bool | None = key(None, "torch's choice of implementation", _FOREACH)


@attrs.frozen
class CompressedConfig(Config):
    """Parameters of all optimizers with compressed communication."""

    lr: float = key(1e-3, "learning rate", _TYPE, low=0)
    betas: tuple[float, float] = key((0.9, 0.999), "decay of the running means", _TYPE)
    eps: float = key(1e-8, "added to the denominator", _TYPE, low=0)
    weight_decay: float = key(0.0, "decay of the parameters", _TYPE, low=0)
    bias_correction: bool = key(True, "nothing: 0.19.6 never applies it here", _TYPE)
    eps_inside_sqrt: bool = key(False, "add eps under the root", _TYPE)
    amsgrad: bool = key(False, "keep the maximum of the second moment", _TYPE)
    cuda_aware: bool = key(False, "MPI sends GPU memory itself", _TYPE)
    comm_backend_name: str = key("nccl", "what carries the messages", _TYPE)


@attrs.frozen
class OneBitAdamConfig(CompressedConfig):
    """Parameters of `OneBitAdam`."""

    lr: float = _lr(1e-3, "onebit_adam")
    freeze_step: int = _freeze_step("onebit_adam")
    betas: tuple[float, float] = _betas(argument("onebit_adam", name="betas"))
    eps: float = _eps(1e-8, "onebit_adam")
    weight_decay: float = _weight_decay(0.0, "onebit_adam")
    bias_correction: bool = key(True, "nothing", _NEVER_APPLIED)
    eps_inside_sqrt: bool = key(False, "nothing", _NEVER_APPLIED)
    amsgrad: bool = _amsgrad()
    cuda_aware: bool = key(False, "MPI sends GPU memory itself", _CARRIED)
    comm_backend_name: str = key("nccl", "what carries the messages", _CARRIED)


@attrs.frozen
class ZeroOneAdamConfig(CompressedConfig):
    """Parameters of `ZeroOneAdam`."""

    lr: float = _lr(1e-3, "zero_one_adam")
    var_freeze_step: int = key(
        100000,
        "updates after which the variance stays",
        argument("zero_one_adam", name="var_freeze_step", note="at least 1"),
        unit="steps",
        low=0,
    )
    var_update_scaler: int = key(
        16,
        "variance updates after which their interval doubles",
        argument("zero_one_adam", name="var_update_scaler"),
        low=1,
    )
    local_step_scaler: int = key(
        32678,
        "updates after which the interval of local steps doubles",
        argument("zero_one_adam", name="local_step_scaler"),
        unit="steps",
        low=1,
    )
    local_step_clipper: int = key(
        16, "longest interval of local steps", argument("zero_one_adam", name="local_step_clipper"), unit="steps", low=1
    )
    betas: tuple[float, float] = _betas(argument("zero_one_adam", name="betas"))
    eps: float = _eps(1e-8, "zero_one_adam")
    weight_decay: float = _weight_decay(0.0, "zero_one_adam")
    bias_correction: bool = key(True, "nothing", _NEVER_APPLIED)
    eps_inside_sqrt: bool = key(False, "nothing", _NEVER_APPLIED)
    amsgrad: bool = _amsgrad()
    cuda_aware: bool = key(False, "MPI sends GPU memory itself", _CARRIED)
    comm_backend_name: str = key("nccl", "what carries the messages", _CARRIED)


@attrs.frozen
class OneBitLambConfig(CompressedConfig):
    """Parameters of `OneBitLamb`."""

    lr: float = _lr(1e-3, "onebit_lamb")
    freeze_step: int = _freeze_step("onebit_lamb")
    betas: tuple[float, float] = _betas(argument("onebit_lamb", name="betas"))
    eps: float = _eps(1e-8, "onebit_lamb")
    weight_decay: float = _weight_decay(0.0, "onebit_lamb")
    max_coeff: float = key(
        10.0, "upper bound of a parameter's trust ratio", argument("onebit_lamb", name="max_coeff"), low=0
    )
    min_coeff: float = key(
        0.01, "lower bound of a parameter's trust ratio", argument("onebit_lamb", name="min_coeff"), low=0
    )
    coeff_beta: float = key(
        0.9, "decay of the running mean of trust ratios", argument("onebit_lamb", name="coeff_beta"), low=0
    )
    factor_max: float = key(
        4.0, "upper bound of the correction of a frozen ratio", argument("onebit_lamb", name="factor_max"), low=0
    )
    factor_min: float = key(
        0.5, "lower bound of the correction of a frozen ratio", argument("onebit_lamb", name="factor_min"), low=0
    )
    factor_threshold: float = key(
        0.1, "bound of the correction's change between updates", argument("onebit_lamb", name="factor_threshold"), low=0
    )
    bias_correction: bool = key(True, "nothing", _NEVER_APPLIED)
    eps_inside_sqrt: bool = key(False, "nothing", _NEVER_APPLIED)
    amsgrad: bool = _amsgrad()
    cuda_aware: bool = key(False, "MPI sends GPU memory itself", _CARRIED)
    comm_backend_name: str = key("nccl", "what carries the messages", _CARRIED)


@attrs.frozen
class MuonConfig(Config):
    """Parameters of `Muon`, and of Adam for the parameters that are not matrices."""

    lr: float | None = key(None, "learning rate of both; null: 0.02 and 0.0003", _TYPE, low=0)
    muon_lr: float | None = key(None, "learning rate of matrices; null: `lr`", _TYPE, low=0)
    adam_lr: float | None = key(None, "learning rate of the others; null: `lr`", _TYPE, low=0)
    momentum: float = key(0.95, "decay of the running mean of matrices' gradients", _TYPE, low=0)
    ns_method: str = key("gram", "how a matrix is made orthogonal", _TYPE)
    betas: tuple[float, float] = key((0.9, 0.95), "decay of the others' running means", _TYPE)
    eps: float = key(1e-10, "added to the others' denominator", _TYPE, low=0)
    weight_decay: float = key(0.0, "share of a parameter that an update takes away", _TYPE, low=0)
    adam_w_mode: bool = key(True, "decay the others themselves, not their gradient", _TYPE)
    torch_adam: bool = key(False, "use torch's Adam for the others", _TYPE)
    fp32_optimizer_states: bool | None = key(None, "keep moments in float32 on the CPU", _TYPE)


PARAMETERS: dict[str, type[Config]] = {  # DeepSpeed's own in lower case; torch's as it is
    "adam": AdamConfig,
    "adamw": AdamConfig,
    "lamb": LambConfig,
    "lion": LionConfig,
    "adagrad": AdagradConfig,
    "SGD": SgdConfig,
    "onebitadam": OneBitAdamConfig,
    "zerooneadam": ZeroOneAdamConfig,
    "onebitlamb": OneBitLambConfig,
    "muon": MuonConfig,
}
SPELLED = {
    "adam": "Adam",
    "adamw": "AdamW",
    "lamb": "Lamb",
    "lion": "Lion",
    "adagrad": "Adagrad",
    "SGD": "SGD",
    "onebitadam": "OneBitAdam",
    "zerooneadam": "ZeroOneAdam",
    "onebitlamb": "OneBitLamb",
    "muon": "Muon",
}
NOT_YET = {"muon": "Muon by attributes of parameters: pass fds.by_name({...: fds.muon(...), ...})"}


def kind_of(type_: str) -> str:
    """Return the name of an optimizer in `PARAMETERS`: case matters for classes of torch.optim only.

    >>> kind_of("AdamW"), kind_of("SGD"), kind_of("sgd") in PARAMETERS
    ('adamw', 'SGD', False)
    """
    return type_ if type_ in PARAMETERS else type_.lower()


@attrs.frozen
class OptimizerConfig(Config):
    """`optimizer`: its type and parameters."""

    type: str | None = key(
        None,
        "its name: one of DeepSpeed's own in any case, or a class of torch.optim",
        argument(*_FUNCTIONS, note="which of them"),
    )
    params: dict[str, Any] = key(
        dict, "what it is made with; below, per type", argument("adamw", note="below"), null=True
    )
    legacy_fusion: bool = key(
        False,
        "an older way to flatten float16 parameters",
        NotApplicable("parameters are flat buckets whenever they are sharded"),
    )

    def check(self) -> None:
        """Raise `ConfigError` for parameters that the optimizer does not take, or without an optimizer."""
        if self.kind is None and self.params:
            raise ConfigError(
                "parameters without an optimizer",
                where="type, params",
                got=f"null, {self.params!r:.60}",
                want=f"type: one of {', '.join(SPELLED.values())}",
            )
        if self.kind in PARAMETERS:
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
        """The type, by its name in `PARAMETERS`."""
        return None if self.type is None else kind_of(self.type)

    @property
    def arguments(self) -> Any:
        """The parameters, as a record of the optimizer's type, which must be in `PARAMETERS`."""
        with within("params."):
            return PARAMETERS[str(self.kind)].from_dict(self.params, defaults=self.defaults)
