"""Files of adapters: what is written is read again, from any ranks, and what is none is refused; see tests/peers."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

import fds
from fds import plans
from fds.errors import StateError, StorageError
from tests.adapters.test_lora import LAYERS, LR, PARAMS, ROWS, close, lora, trained
from tests.bits import assert_same_bits

HEAD = "base_model.model."


def written(folder, *loras):
    step, state, _ = trained(*loras)
    fds.adapters.save(folder, step, state, base="some/model")
    return step, state


@pytest.mark.parametrize("kind", [{}, {"dora": True}, {"stabilized": True, "dropout": 0.25}], ids=str)
def test_what_is_written_is_read_with_its_loss(kind, tmp_path):
    step, state = written(tmp_path, lora(**kind), fds.lora("2.weight", rank=1, alpha=7, **kind))
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["base_model_name_or_path"]) == (2, 3, "some/model")
    assert (config["rank_pattern"], config["alpha_pattern"]) == ({"^2": 1}, {"^2": 7})
    assert config["target_modules"] == ["0.0", "0.2", "1.0", "1.2", "2"]
    assert config["modules_to_save"] is None
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    assert f"{HEAD}0.0.lora_A.weight" in tensors and f"{HEAD}2.bias" not in tensors
    assert (f"{HEAD}1.2.lora_magnitude_vector" in tensors) == ("dora" in kind)
    adapter = fds.adapters.read(tmp_path, name="again")
    other = fds.compose(*adapter.transforms, fds.adamw(LR))(LAYERS)
    begun = other.init(adapter.beside(PARAMS))
    close(other.evaluate(begun, ROWS)["loss"], step.evaluate(state, ROWS)["loss"])
    params = {name.replace(".default.", ".again."): x for name, x in step.params(state).items()}
    close(other.params(begun), params)
    close(other(begun, ROWS)[1]["loss"], other.evaluate(begun, ROWS)["loss"]) if not kind.get("dropout") else None


def test_what_is_trained_beside_is_written_with_its_module(tmp_path):
    step, state = written(
        tmp_path, fds.lora("(0|1).0.weight", rank=2), fds.lora("1.2.weight", rank=2, train=["2.bias"])
    )
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert config["modules_to_save"] == ["2"] and config["target_modules"] == ["0.0", "1.0", "1.2"]
    adapter = fds.adapters.read(tmp_path)
    assert {n for n in adapter.tensors if "lora" not in n} == {"2.weight", "2.bias"}
    begun = fds.compose(*adapter.transforms, fds.adamw(LR))(LAYERS).init(adapter.beside(PARAMS))
    assert_same_bits(begun.params, step.params(state))
    step, state, _ = trained(lora(train=["0.2.bias"]))
    with pytest.raises(StorageError, match="or has an adapter of it"):
        fds.adapters.save(tmp_path, step, state)
    step, state = written(tmp_path, fds.lora("2.weight", rank=2))
    assert json.loads((tmp_path / "adapter_config.json").read_text())["target_modules"] == "2"  # not 0.2, 1.2


def test_ranks_with_slices_write_what_one_writes(tmp_path):
    written(tmp_path / "one", lora())

    def run():
        shard = fds.shard_optimizer(fds.mesh(dp=-1)["dp"], stage=3, persist_below=0)
        step, state, _ = trained(lora(), shard)
        fds.adapters.save(tmp_path / "two", step, state, base="some/model")

    fds.simulate(run, 2)
    one, two = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("one", "two"))
    close(two, one)
    texts = {(tmp_path / name / "adapter_config.json").read_text() for name in ("one", "two")}
    assert len(texts) == 1


def test_what_another_stage_of_a_pipeline_trains_is_written(tmp_path):
    def run():
        axis = fds.mesh(pp=2)["pp"]
        divided = fds.pipeline(plans.one_f_one_b, axis, num_microbatches=2)
        step, state, _ = trained(fds.lora("0.*.weight", rank=2, train=["2.*"]), divided, given=LAYERS.init)
        fds.adapters.save(tmp_path, step, state)

    fds.simulate(run, 2)
    assert json.loads((tmp_path / "adapter_config.json").read_text())["modules_to_save"] == ["2"]
    assert f"{HEAD}2.bias" in load_file(tmp_path / "adapter_model.safetensors")


def test_a_folder_that_cannot_be_written_is_said_on_all_ranks(tmp_path):
    (tmp_path / "file").write_text("")

    def run():
        step, state, _ = trained(lora(), fds.shard_optimizer(fds.mesh(dp=-1)["dp"], stage=3), calls=0)
        with pytest.raises(StorageError, match="rank 0"):
            fds.adapters.save(tmp_path / "file", step, state)
        return True

    assert all(fds.simulate(run, 2))


@pytest.mark.parametrize(
    "change", [{"base": 3}, {"state": 3}, {"step": 3}, {"name": ["default"]}, {"folder": 3}], ids=str
)
def test_bad_arguments_of_save_are_refused(change, tmp_path):
    step, state, _ = trained(lora(), calls=0)
    arguments: dict = {"folder": tmp_path, "step": step, "state": state, **change}
    with pytest.raises(StorageError):
        fds.adapters.save(**arguments)


@pytest.mark.parametrize("params", [3, None, {"0.0.weight": 3}], ids=str)
def test_an_adapter_stands_beside_a_dict_alone(params, tmp_path):
    written(tmp_path, lora())
    with pytest.raises(StateError, match="parameters by name"):
        fds.adapters.read(tmp_path).beside(params)


def test_one_of_several_adapters_is_written(tmp_path):
    both = lora(name="first"), fds.lora("2.weight", rank=3, name="second")
    step, state, _ = trained(*both)
    fds.adapters.save(tmp_path, step, state, name="second")
    adapter = fds.adapters.read(tmp_path)
    assert {*adapter.tensors} == {"2.lora_A.default.weight", "2.lora_B.default.weight"}
    assert_same_bits(adapter.tensors["2.lora_A.default.weight"], step.params(state)["2.lora_A.second.weight"])
    with pytest.raises(StorageError, match="no such adapter"):
        fds.adapters.save(tmp_path, step, state, name="third")
    step, state, _ = trained(lora(), fds.lora("2.weight", rank=2, dora=True))
    with pytest.raises(StorageError, match="one kind"):
        fds.adapters.save(tmp_path, step, state)
    step = fds.compose(fds.lora("w", rank=1, form="view"), fds.sgd(LR))(lambda p, b: p["w"].sum())
    with pytest.raises(StorageError, match="modules' `weight`"):
        fds.adapters.save(tmp_path, step, step.init({"w": torch.ones(2, 2)}))


@pytest.mark.parametrize(
    ("change", "words"),
    {
        "another kind": ({"peft_type": "IA3"}, "peft_type"),
        "biases": ({"bias": "all"}, "bias"),
        "an option": ({"lora_bias": True}, "lora_bias"),
        "no scale": ({"lora_alpha": None}, "lora_alpha"),
        "an infinite scale": ({"lora_alpha": 1e400}, "lora_alpha"),
        "dropout of a word": ({"lora_dropout": "much"}, "lora_dropout"),
    }.values(),
)
def test_configurations_of_others_are_refused(change, words, tmp_path):
    written(tmp_path, lora())
    path = tmp_path / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(StorageError, match=words):
        fds.adapters.read(tmp_path)


@pytest.mark.parametrize(
    ("change", "words"),
    {
        "empty": ({f"{HEAD}0.0.lora_A.weight": torch.zeros(0)}, "had a slice"),
        "an embedding": ({f"{HEAD}0.lora_embedding_A": torch.ones(2, 3)}, "lora_embedding_A"),
        "a convolution": ({f"{HEAD}0.0.lora_A.weight": torch.ones(2, 3, 1, 1)}, "lora_A"),
        "another rank": ({f"{HEAD}0.0.lora_B.weight": torch.ones(12, 3)}, "lora_B"),
        "no head": ({"0.0.lora_A.weight": torch.ones(2, 3)}, "linear layers"),
    }.values(),
)
def test_tensors_of_others_are_refused(change, words, tmp_path):
    written(tmp_path, lora())
    path = tmp_path / "adapter_model.safetensors"
    save_file(load_file(path) | change, path)
    with pytest.raises(StorageError, match=words):
        fds.adapters.read(tmp_path)


def test_files_that_are_none_and_bases_that_are_others_are_refused(tmp_path):
    with pytest.raises(StorageError):
        fds.adapters.read(tmp_path)
    written(tmp_path, lora())
    with pytest.raises(StateError, match="another base"):
        fds.adapters.read(tmp_path).beside({name: x for name, x in PARAMS.items() if name != "0.0.weight"})
    (tmp_path / "adapter_config.json").write_text("[")
    with pytest.raises(StorageError, match="no configuration"):
        fds.adapters.read(tmp_path)
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        (tmp_path / name).write_text("{}")
    with pytest.raises(StorageError):
        fds.adapters.read(tmp_path)
    with pytest.raises(StorageError, match="form"):
        fds.adapters.read(tmp_path, form="matrix")
