"""Every key that DeepSpeed 0.19.6 reads is known, with the default that it has there."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from fds.config import TrainingConfig
from fds.config.field import Argument, NotYet, keys
from fds.config.keys import optimizer
from fds.config.record import Config, record_of, walk

GOLDEN = json.loads((Path(__file__).parents[1] / "golden/config_defaults.json").read_text())["keys"]
OLD = {path for path, entry in GOLDEN.items() if entry.get("deprecated")}
OF_TYPE = re.compile(r"(\w+)\[(\w+)\](\..*)?")


def every_key(cls: type[Config] = TrainingConfig, path: str = "") -> dict:
    """Return JSON path -> what is known, those of optional groups, named groups and parameters too."""
    out = {}
    for name, (type_, known) in keys(cls).items():
        here = path if known.flat else f"{path}{name}"
        inner = record_of(type_)
        of = getattr(type_, "__args__", ())
        if not known.flat:
            out[here] = known
        if inner is not None:
            out |= every_key(inner, here if known.flat else f"{here}.")
        elif len(of) == 2 and isinstance(of[1], type) and issubclass(of[1], Config):
            out |= every_key(of[1], f"{here}.*.")
    return out


def parameters(group: str, kinds: dict[str, type[Config]]) -> dict:
    return {
        f"{group}[{kind}].{path}": known
        for kind, cls in kinds.items()
        for path, known in every_key(cls, "params.").items()
    }


KNOWN = every_key()
KNOWN |= parameters("optimizer", {optimizer.SPELLED[kind]: cls for kind, cls in optimizer.OPTIMIZERS.items()})
KNOWN |= parameters("scheduler", optimizer.SCHEDULERS)


def ours(path: str) -> str:
    """Return our path of a recorded one: those of a kind stand in one record, but for parameters."""
    if path.startswith(("optimizer[", "scheduler[")):
        return path
    return re.sub(r"\[\w+\]", "", path)


REFUSED = {path for path in GOLDEN if path.endswith(".params.max_grad_norm")}  # as 0.19.6 refuses it
BY_TYPE = {"optimizer.params", "scheduler.params"}  # 0.19.6 has null where there is no section
CHECKED = "tensor_parallel.partition_config.layer_specs.*."  # objects of a list, held by that record's check


def test_every_key_that_0_19_6_reads_is_known():
    groups = {
        path
        for path, entry in GOLDEN.items()
        if path.endswith((".*", "].params")) and entry["type"] in ("section", "object")
    }
    missing = {path for path in GOLDEN if ours(path) not in KNOWN} - OLD - REFUSED - groups
    assert {path for path in missing if not path.startswith(CHECKED)} == set()


def test_every_default_is_that_of_0_19_6():
    wrong, compared = {}, 0
    for path, entry in GOLDEN.items():
        known = KNOWN.get(ours(path))
        if known is None or "default" not in entry or path in BY_TYPE | OLD:
            continue
        default = known.default() if callable(known.default) else known.default
        if isinstance(default, Config):
            continue
        compared += 1
        default = list(default) if isinstance(default, tuple) else default
        if default != entry["default"] or isinstance(default, bool) != isinstance(entry["default"], bool):
            wrong[path] = (default, entry["default"])
    assert not wrong
    assert compared > 450


@pytest.mark.parametrize("path", sorted(OLD - {"zero_optimization", "allgather_size"}))
def test_old_spellings_become_what_0_19_6_makes_of_them(path):
    entry = GOLDEN[path]
    group, _, name = path.rpartition(".")
    for word, becomes in entry["becomes"].items():
        value = {"true": True, "false": False, "*": {} if path == "bfloat16" else 7}[word]
        data = {group: {"stage": 3, name: value}} if group else {name: value}
        data = {**data, "zero_optimization": True} if path == "allgather_size" else data
        if path == "zero_optimization.cpu_offload_use_pin_memory":
            assert TrainingConfig.of(data)[path] is value  # it is a key of its own, without effect
            continue
        with pytest.warns(FutureWarning, match=f"{name!r} is an old spelling"):
            config = TrainingConfig.of(data)
        if isinstance(becomes, str):
            assert becomes in config.to_dict()
            continue
        for new, wanted in becomes.items():
            found = config.zero_optimization[new]
            assert (found.to_dict(full=True) if isinstance(found, Config) else found) == _close(wanted, found)


def _close(wanted, found):
    """Return what is wanted, with the keys that the record has beside them."""
    return {**found.to_dict(full=True), **wanted} if isinstance(wanted, dict) else wanted


def test_zero_may_be_switched_on_by_a_truth_value():
    with pytest.warns(FutureWarning, match="zero_optimization"):
        assert TrainingConfig.of({"zero_optimization": True}).zero_optimization.stage == 1
    with pytest.warns(FutureWarning, match="zero_optimization"):
        assert TrainingConfig.of({"zero_optimization": False}).zero_optimization.stage == 0


def test_the_size_beside_that_truth_value_is_taken_too():
    with pytest.warns(FutureWarning, match="old spelling") as told:
        config = TrainingConfig.of({"zero_optimization": True, "allgather_size": 7})
    assert config["zero_optimization.allgather_bucket_size"] == 7
    assert len(told) == 2


def test_nothing_is_asked_for_by_default():
    for defaults in ("0.19.6", "docs"):
        for path, value, known, _ in walk(TrainingConfig(defaults=defaults)):
            if isinstance(known.meaning, NotYet):
                assert value in known.meaning.nothing, path


def test_every_key_says_in_a_line_what_it_is_and_every_value_what_it_means():
    for path, known in KNOWN.items():
        assert known.doc and known.doc[-1] not in ".:" and "\n" not in known.doc, path
        assert known.meaning is not None or any(other.startswith(f"{path}.") for other in KNOWN), path


@pytest.mark.parametrize(
    ("path", "code", "docs"),
    [
        ("steps_per_print", None, 10),
        ("zero_optimization.stage3_prefetch_bucket_size", 50_000_000, 500_000_000),
        ("zero_optimization.stage3_param_persistence_threshold", 100_000, 1_000_000),
        ("zero_optimization.sub_group_size", 10**9, 10**12),
        ("zero_optimization.overlap_comm", None, False),
        ("autotuning.tuner_type", "gridsearch", "model_based"),
        ("autotuning.overwrite", True, False),
    ],
)
def test_the_edition_decides_what_an_absent_key_is(path, code, docs):
    assert TrainingConfig()[path] == code
    assert TrainingConfig(defaults="docs")[path] == docs


def test_the_edition_reaches_the_records_within():
    data = {"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}}
    assert TrainingConfig.of(data)["zero_optimization.offload_param.pin_memory"] is True
    assert TrainingConfig.of(data, defaults="docs")["zero_optimization.offload_param.pin_memory"] is False
    assert TrainingConfig.of(data, defaults="docs").zero_optimization.defaults == "docs"


def test_arguments_outnumber_what_is_left_out_among_the_keys_of_a_step():
    assert sum(isinstance(known.meaning, Argument) for known in KNOWN.values()) > 80
