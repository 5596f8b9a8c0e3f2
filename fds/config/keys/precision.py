"""Mixed precision: the dtypes of parameters, of sums of gradients and of messages, and loss scaling."""

from __future__ import annotations

from typing import Any, Literal

import attrs

from fds.config.contradiction import contradiction
from fds.config.field import AUTO, key
from fds.config.keys.communication import DTYPES, Dtype
from fds.config.meaning import NotApplicable, NotYet, argument
from fds.config.record import Config
from fds.errors import ConfigError

_NO_MASTERS = NotYet("master weights in 16 bit")
_SCALES = ("loss_scale",)


@attrs.frozen
class FP16Config(Config):
    """`fp16`: training in float16, with loss scaling."""

    enabled: bool = key(False, "compute in float16, from float32 master weights", argument("precision", name="compute"))
    auto_cast: bool = key(
        False,
        "cast the model's floating inputs",
        NotApplicable("fds.precision always casts them; fds.precision(inputs=...) says which"),
    )
    loss_scale: float = key(
        0.0, "fixed factor of the loss; 0: one that adapts itself", argument("static_loss_scale", name="scale"), low=0
    )
    initial_scale_power: int = key(
        16, "the first scale is 2 to this power", argument(*_SCALES, name="initial", note="2.0**n"), low=0, high=126
    )
    loss_scale_window: int = key(
        1000,
        "updates without overflow after which the scale doubles",
        argument(*_SCALES, name="window"),
        unit="steps",
        low=0,
    )
    hysteresis: int = key(2, "overflows until the scale is halved", argument(*_SCALES, name="hysteresis"), over=0)
    consecutive_hysteresis: bool = key(
        False, "give the free overflows back after every good update", argument(*_SCALES, name="consecutive_hysteresis")
    )
    min_loss_scale: int = key(1, "smallest scale", argument(*_SCALES, name="minimum"), low=0)
    fp16_master_weights_and_grads: bool = key(False, "keep master weights and gradients in float16", _NO_MASTERS)

    def check(self) -> None:
        """Raise `ConfigError` for a dynamic scale whose window or minimum is 0."""
        if self.enabled is True and self.loss_scale == 0:
            for name in ("loss_scale_window", "min_loss_scale"):
                if self[name] == 0:
                    raise contradiction(
                        self,
                        "a dynamic loss scale needs this number",
                        name,
                        "loss_scale",
                        want=f"{name} more than 0, or a fixed loss_scale",
                    )


@attrs.frozen
class BF16Config(Config):
    """`bf16`: training in bfloat16, which needs no loss scaling."""

    enabled: bool = key(
        False, "compute in bfloat16, from float32 master weights", argument("precision", name="compute")
    )
    immediate_grad_update: bool = key(
        False, "add gradients to their sum in a hook", NotApplicable("gradients are summed as backward makes them")
    )
    check_grad_overflow: bool = key(True, "skip an update whose gradients are not finite", argument("skip_nonfinite"))
    bf16_master_weights_and_grads: bool = key(False, "keep master weights and gradients in bfloat16", _NO_MASTERS)
    bf16_optimizer_states: bool = key(
        False, "keep the optimizer's state in bfloat16", NotYet("16-bit optimizer states")
    )


@attrs.frozen
class AmpConfig(Config):
    """`amp`: mixed precision by Apex in DeepSpeed, by torch.autocast here."""

    enabled: bool = key(
        False,
        "choose the dtype of every operator by a list",
        argument("autocast", "loss_scale", note="float16, with a loss that is scaled"),
    )
    opt_level: Literal["O0", "O1", "O2", "O3"] = key(
        "O1", "Apex's policy", NotYet("Apex's O0, O2 and O3: write fp16 instead of O2", nothing=("O1",))
    )
    loss_scale: float | Literal["dynamic"] | None = key(
        None, "fixed factor of the loss, or dynamic", argument("static_loss_scale", name="scale")
    )
    cast_model_type: Any = key(None, "Apex's dtype of parameters", NotYet("Apex's own choices"))
    patch_torch_functions: bool | None = key(None, "let Apex patch torch", NotApplicable("torch.autocast does this"))
    keep_batchnorm_fp32: bool | str | None = key(
        None, "norms in float32", NotApplicable("torch.autocast runs norms in float32")
    )
    master_weights: bool | None = key(None, "float32 master weights", NotApplicable("parameters stay float32"))
    verbosity: int = key(1, "what Apex prints", NotApplicable("a step prints nothing"))
    min_loss_scale: float | None = key(None, "smallest scale", argument("loss_scale", name="minimum"))
    max_loss_scale: float = key(2.0**24, "largest scale", NotYet("a largest loss scale", nothing=(2.0**24,)))


@attrs.frozen
class TorchAutocastConfig(Config):
    """`torch_autocast`: mixed precision by torch.autocast."""

    enabled: bool = key(False, "run the loss under torch.autocast", argument("autocast"))
    dtype: Literal["bfloat16", "float16", "bf16", "fp16", "half", "torch.bfloat16", "torch.float16"] | None = key(
        None, "what operators compute in; absent: bfloat16", argument("autocast", name="dtype"), null=False
    )
    lower_precision_safe_modules: tuple[str, ...] | None = key(
        None,
        "modules whose gradients are sent in `dtype`; absent: none, in 0.19.6 linear layers and convolutions",
        NotYet("a dtype of messages per module"),
        null=False,
    )


@attrs.frozen
class DataTypesConfig(Config):
    """`data_types`: dtypes other than that of the parameters in the step."""

    grad_accum_dtype: Dtype | None = key(
        None,
        "dtype of the sum of microbatches' gradients; null: that of the parameters in the step",
        argument("precision", name="accumulate"),
    )
    param_dtype: Dtype | None = key(
        None, "dtype of parameters in the step", NotApplicable("it may say again what fp16 and bf16 say, no other")
    )
    buffer_dtype: Dtype | None = key(None, "dtype of buffers; null: their own", NotYet("buffers in another dtype"))


def check_one_precision(config: Any) -> None:
    """Raise `ConfigError` if two kinds of mixed precision are enabled, or dtypes contradict each other."""
    enabled = [
        name
        for name in ("fp16", "bf16", "amp", "torch_autocast")
        if config[f"{name}.enabled"] is not False and config[f"{name}.enabled"] != AUTO
    ]
    if len(enabled) > 1:
        where = ", ".join(f"{name}.enabled" for name in enabled)
        raise ConfigError(
            "only one kind of mixed precision can be enabled", where=where, got="all of them", want="one of them true"
        )
    named = config["data_types.param_dtype"]
    usual = "fp16" if "fp16" in enabled else "bf16" if "bf16" in enabled else "fp32"
    if named not in (None, AUTO) and DTYPES[named] != DTYPES[usual]:
        raise ConfigError(
            "parameters have two dtypes",
            where="data_types.param_dtype, fp16.enabled, bf16.enabled",
            got=f"{named}, and {usual} by the others",
            want=f"{usual!r}, or null",
        )
    if "amp" in enabled and config["zero_optimization.stage"] not in (0, AUTO):
        raise ConfigError(
            "Apex's amp cannot be used with ZeRO",
            where="amp.enabled, zero_optimization.stage",
            got=f"true, {config['zero_optimization.stage']}",
            want="stage 0, or torch_autocast for amp",
        )
