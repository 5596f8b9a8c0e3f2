"""Models of transformers read from their files into slices, and written back: `from_pretrained` is the oracle."""

import importlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import fds
import fds.hf
from fds.errors import ComposeError, FdsError, StorageError, StorageWarning
from fds.storage.foreign import weight_files
from tests import ranks
from tests.bits import assert_same_bits

pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")]

SIZES = {"vocab_size": 101, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "bos_token_id": 1, "eos_token_id": 2}
T5 = {"vocab_size": 101, "d_model": 32, "d_ff": 64, "num_layers": 1, "num_heads": 4, "d_kv": 8}
FAMILIES = {
    "llama": ("AutoModelForCausalLM", "LlamaConfig", {**SIZES, **HEADS, "tie_word_embeddings": False}),
    "tied": ("AutoModelForCausalLM", "LlamaConfig", {**SIZES, **HEADS, "tie_word_embeddings": True}),
    "gpt2": ("AutoModelForCausalLM", "GPT2Config", {"vocab_size": 101, "n_embd": 32, "n_layer": 2, "n_head": 2}),
    "bert": ("AutoModelForSequenceClassification", "BertConfig", {**SIZES, "num_attention_heads": 4}),
    "mixtral": ("AutoModelForCausalLM", "MixtralConfig", {**SIZES, **HEADS, "num_local_experts": 4}),
    "t5": ("AutoModelForSeq2SeqLM", "T5Config", T5),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return the folder of a model of a family, in shards."""
    transformers = importlib.import_module("transformers")
    root = tmp_path_factory.mktemp("models")

    def made(family: str) -> Path:
        if not (root / family).exists():
            cls, config, sizes = FAMILIES[family]
            torch.manual_seed(0)
            model = getattr(transformers, cls).from_config(getattr(transformers, config)(**sizes))
            model.save_pretrained(root / family, max_shard_size="40KB")
        return root / family

    return made


@pytest.fixture
def llama(folder, tmp_path):
    """Return a copy of a folder, to change."""
    return Path(shutil.copytree(folder("llama"), tmp_path / "llama"))


def pretrained(path, dtype: Any = torch.float32):
    transformers = importlib.import_module("transformers")
    names = json.loads((path / "config.json").read_text())["architectures"]
    return getattr(transformers, names[0]).from_pretrained(path, dtype=dtype)


def named(module):
    return {name: p.detach() for name, p in module.named_parameters()}


def plain(*more):
    return fds.compose(*more, fds.sgd(0.1))(lambda params, batch: params)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_tensors_of_from_pretrained_bit_for_bit(family, folder):
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        theirs, model = pretrained(folder(family), dtype), fds.hf.lazy(folder(family), dtype=dtype)
        assert all(p.is_meta for p in model.module.parameters()) and model.module.training
        assert_same_bits(dict(model.module.named_buffers()), dict(theirs.named_buffers()))
        step = plain()
        for state in (fds.hf.init(step, model), step.init(model.params)):
            assert_same_bits(step.params(state), named(theirs))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_at_every_stage_each_rank_reads_its_bytes_once(stage, folder, monkeypatch):
    path, counted = folder("llama"), []
    theirs = named(pretrained(path))
    reader = weight_files._reader

    def counting(*place):
        read = reader(*place)
        return lambda start, out: counted.append(out.nbytes) or read(start, out)

    monkeypatch.setattr(weight_files, "_reader", counting)

    def run():
        axis = fds.mesh(dp=-1)["dp"]
        step = plain(fds.shard_optimizer(axis, stage=stage)) if stage else plain()
        model = fds.hf.lazy(path)
        state = fds.hf.init(step, model, key=3)
        assert_same_bits(step.params(state), theirs)
        again = step.init(theirs, key=3)
        assert_same_bits(fds.tree.paths(state), fds.tree.paths(again))
        return True

    assert all(fds.simulate(run, 2 if stage else 1))
    assert sum(counted) == sum(x.nbytes for x in theirs.values())


@pytest.mark.parametrize("stage", [0, 3])
def test_frozen_weights_are_encoded_as_they_are_read(stage, folder):
    path = folder("llama")
    theirs = named(pretrained(path))

    def run():
        sharded = [fds.shard_optimizer(fds.mesh(dp=-1)["dp"], stage=stage)] if stage else []
        step = plain(*sharded, fds.freeze("*mlp*", "*embed*"), fds.quantize_frozen())
        state, want = fds.hf.init(step, fds.hf.lazy(path)), step.init(theirs)
        assert_same_bits(fds.tree.paths(state), fds.tree.paths(want))
        return True

    assert all(fds.simulate(run, 2 if stage else 1))


@pytest.mark.parametrize("stage", [0, 3])
def test_what_lora_adds_is_made_beside_what_is_read(stage, folder):
    path = folder("llama")
    theirs = named(pretrained(path))

    def run():
        sharded = [fds.shard_optimizer(fds.mesh(dp=-1)["dp"], stage=stage)] if stage else []
        lora = fds.lora("*.(q|v)_proj.weight", rank=2, form="view")
        step = plain(*sharded, fds.quantize_frozen(bits=4), lora)
        state, want = fds.hf.init(step, fds.hf.lazy(path), key=3), step.init(theirs, key=3)
        assert_same_bits(fds.tree.paths(state), fds.tree.paths(want))
        return True

    assert all(fds.simulate(run, 2 if stage else 1))


def test_a_base_without_its_adapter_is_not_written(folder, tmp_path):
    path = folder("llama")
    model = fds.hf.lazy(path)
    step = plain(fds.lora("*.(q|v)_proj.weight", rank=2, form="view"))
    state = fds.hf.init(step, model)
    with pytest.raises(StorageError, match=r"adapters\.save\(out, step, state\)"):
        fds.hf.save(state, step, tmp_path / "out", source=model)
    assert not (tmp_path / "out").exists()


def test_pieces_of_a_tensor_axis_are_read_and_trained(folder):
    path = folder("llama")
    theirs = named(pretrained(path))
    tokens = torch.arange(24).view(4, 6)

    def run(size):
        model = fds.hf.lazy(path)
        apply = model.apply
        parts = [fds.tensor_parallel(fds.mesh(tp=-1)["tp"], plan="auto")] if size > 1 else []
        step = fds.compose(*parts, fds.sgd(0.1))(lambda p, b: apply(p, input_ids=b, labels=b).loss)
        state = fds.hf.init(step, model)
        assert_same_bits(step.params(state), theirs)
        return step(state, tokens)[1]["loss"]

    (one,) = fds.simulate(lambda: run(1), 1)
    for loss in fds.simulate(lambda: run(2), 2):
        torch.testing.assert_close(loss, one)


@pytest.mark.parametrize("family", ["tied", "bert", "mixtral"])
def test_from_pretrained_loads_what_was_saved_with_difference_zero(family, folder, tmp_path):
    path = folder(family)
    (tmp_path / "tokenizer.json").touch()

    def run(stage):
        sharded = [fds.shard_optimizer(fds.mesh(dp=-1)["dp"], stage=stage)] if stage else []
        model = fds.hf.lazy(path)
        step = fds.compose(*sharded, fds.adamw(0.1))(lambda params, batch: params)
        state = fds.hf.init(step, model)
        fds.hf.save(state, step, tmp_path / f"{stage}", source=model, max_shard_bytes=30_000)
        return step.params(state)

    for stage in (0, 3):
        params, *_ = fds.simulate(lambda stage=stage: run(stage), 2 if stage else 1)
        again = pretrained(tmp_path / f"{stage}", dtype="auto")
        assert_same_bits(named(again), params)
        index = json.loads((tmp_path / f"{stage}" / "model.safetensors.index.json").read_text())
        assert len(set(index["weight_map"].values())) > 1


def test_what_stands_beside_the_weights_is_copied_and_the_dtype_is_that_of_the_files(llama, tmp_path):
    (llama / "tokenizer.json").write_text("{}")
    (llama / "pytorch_model.bin.index.json").write_text("{}")
    model, step = fds.hf.lazy(llama), plain()
    state = fds.hf.init(step, model)
    files = fds.hf.save(state, step, tmp_path / "out", source=llama, dtype=torch.bfloat16)
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {"config.json", "generation_config.json", "tokenizer.json", "model.safetensors"}
    assert [path.name for path in files] == ["model.safetensors"]
    again = pretrained(tmp_path / "out", dtype="auto")
    assert again.dtype == torch.bfloat16
    assert_same_bits(named(again), {name: x.bfloat16() for name, x in step.params(state).items()})
    fds.hf.save(state, step, tmp_path / "out", source=model)  # over the files that are there
    assert_same_bits(named(pretrained(tmp_path / "out", dtype="auto")), step.params(state))


def test_a_new_head_is_initialised_and_said(folder):
    transformers = importlib.import_module("transformers")
    path, cls = folder("bert"), transformers.AutoModelForTokenClassification
    config = transformers.AutoConfig.from_pretrained(path, num_labels=5)
    with pytest.raises(StorageError, match=r"classifier\.bias(.|\n)*\(2,\)(.|\n)*\(5,\)"):
        fds.hf.lazy(path, cls=cls, config=config)
    with pytest.warns(StorageWarning, match="classifier"):
        model = fds.hf.lazy(path, cls=cls, config=config, strict=False)
    assert model.names["classifier.weight"] == () and model.names["classifier.bias"] == ()
    step = plain()
    params = step.params(fds.hf.init(step, model, key=1))
    want = named(pretrained(path))
    assert_same_bits({n: params[n] for n in params if n in want and "classifier" not in n},
                     {n: want[n] for n in params if n in want and "classifier" not in n})  # fmt: skip
    head = params["classifier.weight"]
    assert head.shape == (5, 32) and 0.01 < head.std() < 0.04 and not params["classifier.bias"].any()
    assert_same_bits(step.params(step.init(model.params, key=1)), params)
    assert not torch.equal(step.params(fds.hf.init(step, model, key=2))["classifier.weight"], head)


def test_a_saved_run_is_loaded_by_the_recipe(folder, tmp_path):
    model, step = fds.hf.lazy(folder("llama")), plain()
    state = fds.hf.init(step, model)
    fds.save(tmp_path / "run", state, step)
    assert_same_bits(fds.tree.paths(fds.load(tmp_path / "run", step, model.params)[0]), fds.tree.paths(state))


def shard_with(path, name):
    index = json.loads((path / "model.safetensors.index.json").read_text())
    return path / index["weight_map"][name], index


def test_faults_of_files_are_named(llama, tmp_path):
    from safetensors.torch import load_file, save_file

    name = "model.layers.1.mlp.up_proj.weight"
    file, _ = shard_with(llama, name)
    good = load_file(file)
    save_file({**good, name: torch.zeros(3, 4)}, file, {"format": "pt"})
    with pytest.raises(StorageError, match=r"another shape(.|\n)*up_proj(.|\n)*\(3, 4\)(.|\n)*\(64, 32\)"):
        fds.hf.lazy(llama)
    save_file({**good, "odd": torch.zeros(3)}, file, {"format": "pt"})
    with pytest.raises(StorageError, match="odd"):
        fds.hf.lazy(llama)
    save_file({n: x for n, x in good.items() if n != name}, file, {"format": "pt"})
    with pytest.raises(StorageError, match=f"{name}"):
        fds.hf.lazy(llama)
    save_file(good, file, {"format": "pt"})
    model = fds.hf.lazy(llama)
    size = file.stat().st_size
    with open(file, "r+b") as opened:
        opened.truncate(size - 8)
    with pytest.raises(StorageError, match=file.name):
        fds.hf.init(plain(), model)
    with pytest.raises(StorageError, match=file.name):
        fds.hf.lazy(llama)
    file.unlink()
    with pytest.raises(StorageError, match=file.name):
        fds.hf.lazy(llama)


def test_tied_tensors_that_differ_are_refused_and_equal_ones_are_one(folder, tmp_path):
    transformers = importlib.import_module("transformers")
    from safetensors.torch import load_file, save_file

    path = Path(shutil.copytree(folder("tied"), tmp_path / "tied"))
    weights = {}
    for file in path.glob("model*"):
        weights |= load_file(file) if file.suffix == ".safetensors" else {}
        file.unlink()
    head = weights["model.embed_tokens.weight"].clone()
    save_file({**weights, "lm_head.weight": head}, path / "model.safetensors", {"format": "pt"})
    step = plain()
    assert_same_bits(step.params(fds.hf.init(step, fds.hf.lazy(path))), named(pretrained(path)))
    save_file({**weights, "lm_head.weight": head + 1}, path / "model.safetensors", {"format": "pt"})
    with pytest.raises(StorageError, match="tie_word_embeddings"):
        fds.hf.lazy(path)
    config = transformers.AutoConfig.from_pretrained(path, tie_word_embeddings=False)
    params = step.params(fds.hf.init(step, fds.hf.lazy(path, config=config)))
    torch.testing.assert_close(params["lm_head.weight"], head + 1, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"cls": 3}, ComposeError),
        ({"cls": torch.nn.Linear}, ComposeError),
        ({"config": {}}, ComposeError),
        ({"dtype": torch.int8}, ComposeError),
        ({"dtype": "float32"}, ComposeError),
        ({"strict": "no"}, ComposeError),
    ],
    ids=str,
)
def test_bad_arguments_are_refused(arguments, error, folder):
    with pytest.raises(error):
        fds.hf.lazy(folder("llama"), **arguments)


def test_bad_folders_and_models_are_refused(llama, tmp_path):
    bad: Any
    for bad in (3, tmp_path / "nowhere", tmp_path):
        with pytest.raises(StorageError):
            fds.hf.lazy(bad)
    model, step = fds.hf.lazy(llama), plain()
    state = fds.hf.init(step, model)
    for bad in (model.module, model.params, "llama"):
        with pytest.raises(StorageError, match=r"fds\.hf\.lazy"):
            fds.hf.init(step, bad)
    for arguments in ({"source": 3}, {"source": tmp_path / "nowhere"}, {"dtype": torch.int8}, {"max_shard_bytes": 0}):
        with pytest.raises(FdsError):
            fds.hf.save(state, step, tmp_path / "out", **{"source": model, **arguments})
    bad = model.params
    with pytest.raises(FdsError):
        fds.hf.save(bad, step, tmp_path / "out", source=model)
    other = fds.compose(fds.sgd(0.1))(lambda params, batch: params["lm_head.weight"].sum())
    with pytest.raises(StorageError, match="another model than the source"):
        fds.hf.save(other.init({"lm_head.weight": torch.ones(2)}), other, tmp_path / "out", source=model)
    eight = plain(fds.freeze("*mlp*"), fds.quantize_frozen())
    held = fds.hf.init(eight, model)
    with pytest.raises(StorageError, match="view=True"):
        fds.hf.save(held, eight, tmp_path / "out", source=model)
    fds.hf.save(held, eight, tmp_path / "out", source=model, view=True)
    assert_same_bits(named(pretrained(tmp_path / "out")), eight.params(held))
    (llama / "config.json").write_text("{")
    with pytest.raises(StorageError, match=r"config\.json"):
        fds.hf.lazy(llama)


def resident(path):
    """Run on a rank: return bytes of the slices, and of the peak above what was resident before."""
    import fds.hf

    step = plain(fds.shard_optimizer(fds.mesh(dp=-1)["dp"], stage=3))
    high_water = lambda name: int(Path("/proc/self/status").read_text().split(f"{name}:")[1].split()[0]) * 1024
    model = fds.hf.lazy(path)
    fds.hf.init(step, model)  # what the first call imports and starts
    Path("/proc/self/clear_refs").write_text("5")
    before = high_water("VmRSS")
    state = fds.hf.init(step, model)
    return sum(x.nbytes for x in fds.tree.leaves(state.params)), high_water("VmHWM") - before


def test_a_rank_holds_its_slice_and_little_more(tmp_path):
    transformers = importlib.import_module("transformers")
    sizes = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 2, "vocab_size": 16_000}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=8, bos_token_id=1, eos_token_id=2)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "m", max_shard_size="100MB")
    for held, peak in ranks.run(resident, str(tmp_path / "m"), world_size=2, timeout=240.0):
        assert held > 45 * 2**20 and peak <= held + 16 * 2**20


# --- Weights for an engine


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_are_streamed_under_the_names_of_the_files(folder, family):
    path = folder(family)
    opened = {}
    for file in path.glob("*.safetensors"):
        opened |= importlib.import_module("safetensors.torch").load_file(file)

    def body():
        axis = fds.mesh(dp=-1)["dp"]
        model = fds.hf.lazy(path)
        step = fds.compose(fds.shard_optimizer(axis, stage=3), fds.sgd(0.1))(lambda p, x: p)
        state = fds.hf.init(step, model)
        return dict(step.weights(state, names=fds.hf.file_names(model), bucket_bytes=20_000))

    for got in fds.simulate(body, 2):
        assert_same_bits(got, opened)


def test_an_engine_that_loads_what_is_streamed_computes_what_the_trainer_does(folder):
    path, transformers = folder("tied"), importlib.import_module("transformers")
    model = fds.hf.lazy(path)
    apply, tokens = model.apply, torch.arange(12).view(2, 6)
    step = fds.compose(fds.sgd(0.1))(lambda p, x: apply(p, input_ids=x).logits.square().mean())
    state, _ = step(fds.hf.init(step, model), tokens)
    engine = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(path))
    tied = {"model.embed_tokens.weight": ["model.embed_tokens.weight", "lm_head.weight"], "*": "*"}
    engine.load_state_dict(dict(step.weights(state, names=tied)), strict=True)
    want = apply(state.params, input_ids=tokens).logits
    assert torch.equal(engine(input_ids=tokens).logits, want)


@pytest.mark.parametrize("bad", ["gpt2", torch.nn.Linear(2, 2), None])
def test_names_of_what_is_no_model_are_refused(bad):
    with pytest.raises(ComposeError, match="takes a model of transformers"):
        fds.hf.file_names(bad)
