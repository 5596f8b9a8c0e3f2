"""A candidate as text: as Python that composes it, and as much of it as a JSON of DeepSpeed can say."""

from __future__ import annotations

import ast
import importlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import attrs
import torch

from fds import media, plans, schedules, transports
from fds.collectives.meshes import planned
from fds.config.function_call import FUNCTIONS
from fds.config.training import TrainingConfig
from fds.errors import FdsError
from fds.step import compose
from fds.tuning.spaces import Candidate, Space

_FDS: Any = importlib.import_module("fds")  # all that a program finds in it
_ROOMS = {"schedules": schedules, "transports": transports, "plans": plans}
_DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
_BFLOAT16 = {"bf16": {"enabled": True, "check_grad_overflow": False}}
_OPTIMIZERS = {"adamw": "AdamW", "adam": "Adam", "lamb": "Lamb", "lion": "Lion", "adagrad": "Adagrad", "sgd": "SGD"}


@attrs.frozen
class InJson:
    """A composition as DeepSpeed's JSON says it.

    Attributes:
        config: for `fds.initialize`, on the candidate's mesh.
        unsaid: what of the composition it does not say, or says otherwise, one text each.
    """

    config: Mapping[str, Any]
    unsaid: tuple[str, ...]


def python_of(space: Space, candidate: Candidate) -> str:
    """Return a program that makes the candidate's mesh and its composition."""
    with planned(candidate.axes, 0) as ranks:
        text = repr(space.compose(ranks, **candidate.choices))
    sizes = ", ".join(f"{name}={size}" for name, size in candidate.axes.items())
    try:
        made = _Qualified()
        call = made.visit(ast.parse(text, mode="eval")).body
        parts = "".join(f"    {ast.unparse(part)},\n" for part in call.args)
        written = f"composition = fds.compose(\n{parts})"
        others = [f"# of your own: {', '.join(sorted(made.others))}"] if made.others else []
    except SyntaxError:  # an argument that prints as an object
        words = ", ".join(f"{name}={value!r}" for name, value in candidate.choices.items())
        written, others = f"composition = compose(mesh, {words})", ["# compose: the function of the space"]
    imports = ["import torch\n"] if "torch." in written else []
    return "\n".join([*imports, "import fds", *others, "", f"mesh = fds.mesh({sizes})", written, ""])


class _Qualified(ast.NodeTransformer):
    """Names as a program finds them: `quantized` is `fds.transports.quantized`."""

    def __init__(self) -> None:
        self.others: set[str] = set()  # which fds does not have

    def visit_Name(self, node: ast.Name) -> ast.expr:
        name = node.id
        room = next((room for room, module in _ROOMS.items() if name in module.__all__), "")
        if name in ("mesh", "torch", "fds"):
            return node
        if not room and not hasattr(_FDS, name):
            self.others.add(name)
            return node
        return ast.parse(".".join(filter(None, ("fds", room, name))), mode="eval").body


def json_of(space: Space, candidate: Candidate, num_rows: int) -> InJson:
    """Return the candidate in a JSON of DeepSpeed, with rows of a step of all ranks, and what that does not say.

    The JSON is composed again, and compared.
    """
    with planned(candidate.axes, 0) as ranks:
        parts = compose(space.compose(ranks, **candidate.choices)).parts
        config: dict[str, Any] = {"train_batch_size": num_rows} if num_rows else {}
        for part in sorted(parts, key=lambda part: part.name != "precision"):  # of which others change keys
            name, arguments = _call(part)
            if (keys := _KEYS.get(name)) is not None:
                _merge(config, keys(arguments, candidate.axes))
            elif name in _OPTIMIZERS:
                _merge(config, _optimizer_keys(name, arguments))
        try:
            again = compose(*TrainingConfig.of(config).transforms(ranks)).parts
        except FdsError as error:
            return InJson(config, (f"{error.what}: {error.where}",))
    return InJson(config, tuple(_differences(parts, again)))


def _differences(parts: Any, again: Any) -> Iterator[str]:
    said = {_call(part)[0]: part for part in again}
    for part in parts:
        name, arguments = _call(part)
        other = said.pop(name, None)
        if other is None:
            yield f"{part}: no key"
        elif repr(_call(other)[1]) != repr(arguments):
            yield f"{part}: the JSON is {other}"
    for other in said.values():
        if repr(other) not in ("shard_optimizer(mesh['dp'], stage=0)",):  # which every JSON has
            yield f"nothing: the JSON is {other}"


def _call(part: Any) -> tuple[str, dict[str, Any]]:
    """Return the name and all arguments, defaults included, of a transform, or of the optimizer that it is."""
    name, arguments = part.name, dict(part.by_name)
    if name == "optimizer":
        call = ast.parse(repr(part), mode="eval").body
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
            return repr(part), {}
        name = call.func.id
        arguments = {word.arg: _value(word.value) for word in call.keywords if word.arg}
    if name in FUNCTIONS:
        parameters = inspect.signature(FUNCTIONS[name]).parameters.values()
        defaults = {x.name: x.default for x in parameters if x.default is not x.empty}
        arguments = dict(sorted({**defaults, **arguments}.items()))
    return name, arguments


def _value(node: ast.expr) -> Any:
    try:
        return ast.literal_eval(node)
    except ValueError:  # a schedule
        return ast.unparse(node)


def _merge(into: dict[str, Any], other: Mapping[str, Any]) -> None:
    for name, value in other.items():
        if isinstance(value, Mapping):
            _merge(into.setdefault(name, {}), value)
        else:
            into[name] = value


def _optimizer_keys(name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    plain = {k: [*v] if isinstance(v, tuple) else v for k, v in arguments.items() if isinstance(v, int | float | tuple)}
    if name in ("adam", "adamw"):
        plain["adam_w_mode"] = name == "adamw"
    return {"optimizer": {"type": _OPTIMIZERS[name], "params": plain}}


def _plain(**values: Any) -> dict[str, Any]:
    """Return those that JSON has."""
    return {name: value for name, value in values.items() if isinstance(value, str)}


def _sharding_keys(arguments: Mapping[str, Any], axes: Mapping[str, int]) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": arguments["stage"]}
    if arguments["stage"] == 3:
        zero["stage3_param_persistence_threshold"] = max(arguments["persist_below"] - 1, 0)
    if arguments["bucket_bytes"]:
        zero["reduce_bucket_size"] = arguments["bucket_bytes"] // 4
    ways = {"zero_quantized_weights": ("weights", 8), "zero_quantized_gradients": ("gradients", 4)}
    zero |= {key: True for key, (name, bits) in ways.items() if repr(arguments[name]) == f"quantized({bits})"}
    return {"zero_optimization": zero}


def _offload_keys(arguments: Mapping[str, Any], axes: Mapping[str, int]) -> dict[str, Any]:
    groups = {
        "offload_optimizer": _medium_keys(arguments["moments"]),
        "offload_param": _medium_keys(arguments["masters"]),
    }
    return {"zero_optimization": {name: keys for name, keys in groups.items() if keys}}


def _medium_keys(where: Any) -> dict[str, Any]:
    if isinstance(where, media.Disk):
        return {"device": "nvme", "nvme_path": str(where.directory)}
    return {"device": "cpu"} if where == "host" else {}


_Keys = Callable[[Mapping[str, Any], Mapping[str, int]], dict[str, Any]]
_KEYS: Mapping[str, _Keys] = {  # transform -> what a JSON says of its arguments
    "accumulate": lambda x, axes: {"gradient_accumulation_steps": x["num_microbatches"]},
    "pipeline": lambda x, axes: {
        "gradient_accumulation_steps": x["num_microbatches"],
        "pipeline": {"stages": axes.get("pp", 1), **_plain(partition=x["partition"])},
    },
    "tensor_parallel": lambda x, axes: {"tensor_parallel": {"autotp_size": axes.get("tp", 1)}},
    "checkpoint_activations": lambda x, axes: {
        "pipeline": {"activation_checkpoint_interval": x["every"]},
        "activation_checkpointing": {"cpu_checkpointing": x["store"] == "host"},
    },
    "shard_optimizer": _sharding_keys,
    "offload": _offload_keys,
    "clip_by_global_norm": lambda x, axes: {"gradient_clipping": next(iter(x.values()))},
    "precision": lambda x, axes: {
        **({"fp16": {"enabled": True}} if x["compute"] == torch.float16 else _BFLOAT16),
        "data_types": {"grad_accum_dtype": _DTYPES.get(x["accumulate"], "fp32")},
        "communication_data_type": _DTYPES.get(x["reduce"] or x["accumulate"], "fp32"),
    },
    "skip_nonfinite": lambda x, axes: {"bf16": {"check_grad_overflow": True}},
}
