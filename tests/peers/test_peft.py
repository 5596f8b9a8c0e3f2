"""Adapters beside peft: the same numbers and gradients on GPT-2 and Llama, and its files both ways."""

import importlib
import warnings

import pytest
import torch

import fds

pytestmark = pytest.mark.peers

KINDS = {"plain": {}, "stabilized": {"stabilized": True}, "dora": {"dora": True}}
TARGETS = {"gpt2": ["c_attn", "c_fc", "c_proj"], "llama": ["q_proj", "v_proj", "up_proj", "down_proj"]}
PATTERN = {"gpt2": "*.(c_attn|c_fc|c_proj).weight", "llama": "*.(q|v|up|down)_proj.weight"}


def model(family, **more):
    transformers = importlib.import_module("transformers")
    torch.manual_seed(0)
    if family == "gpt2":
        kind = {"vocab_size": 31, "n_positions": 16, "n_embd": 8, "n_layer": 2, "n_head": 2}
        kind |= {"bos_token_id": 0, "eos_token_id": 0}
        return (
            transformers.GPT2LMHeadModel(transformers.GPT2Config(**kind, attn_implementation="eager")).double().eval()
        )
    config = transformers.LlamaConfig(
        vocab_size=31, hidden_size=8, intermediate_size=12, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=more.get("num_key_value_heads", 1), bos_token_id=0, eos_token_id=0,
        attn_implementation="eager",
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).double().eval()


def peft_of(family, kind):
    peft = importlib.import_module("peft")
    config = peft.LoraConfig(
        r=3, lora_alpha=5, target_modules=TARGETS[family], use_dora="dora" in kind,
        use_rslora="stabilized" in kind, fan_in_fan_out=family == "gpt2",
        modules_to_save=["lm_head"] if family == "llama" else None,  # GPT-2's is its embedding
    )  # fmt: skip
    adapted = peft.get_peft_model(model(family), config, autocast_adapter_dtype=False).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, p in adapted.named_parameters():
            if "lora_" in name:
                p += 0.3 * torch.randn(p.shape, generator=generator, dtype=p.dtype)
    return adapted


def tokens():
    return torch.randint(0, 31, (3, 7), generator=torch.Generator().manual_seed(2))


def local_name(name):
    name = name.removeprefix("base_model.model.").replace("lora_magnitude_vector", "lora_M")
    return name.replace("modules_to_save.default.", "")


@pytest.fixture
def quiet():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.mark.parametrize("form", ["layer", "view"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", TARGETS)
def test_loss_and_gradients_are_those_of_peft(family, kind, form, tmp_path, quiet):
    theirs = peft_of(family, KINDS[kind])
    theirs.save_pretrained(tmp_path)
    want = theirs(input_ids=tokens(), labels=tokens()).loss
    trained = {n: p for n, p in theirs.named_parameters() if p.requires_grad}
    want_grads = dict(zip(map(local_name, trained), torch.autograd.grad(want, [*trained.values()]), strict=True))

    adapter = fds.adapters.read(tmp_path, form=form)
    apply, params, _ = fds.functional(model(family))
    step = fds.compose(*adapter.transforms, fds.sgd(1.0))(lambda p, b: apply(p, input_ids=b, labels=b).loss)
    state = step.init(adapter.beside(params))
    new, metrics = step(state, tokens())
    torch.testing.assert_close(metrics["loss"], want.detach(), rtol=1e-6, atol=1e-9)
    before, after = step.params(state), step.params(new)
    changed = {n for n in before if not torch.equal(before[n], after[n])}
    assert changed == want_grads.keys()
    for name in changed:
        torch.testing.assert_close(before[name] - after[name], want_grads[name], rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("form", ["layer", "view"])
@pytest.mark.parametrize(("family", "kind"), [("gpt2", "plain"), ("llama", "plain"), ("llama", "dora")])
def test_ranks_of_a_tensor_axis_have_the_loss_and_gradients_of_peft(family, kind, form, tmp_path, quiet):
    peft = importlib.import_module("peft")
    targets = ["q_proj", "up_proj"] if kind == "dora" else TARGETS[family]  # rows are whole where outputs are divided
    torch.manual_seed(3)
    config = peft.LoraConfig(r=3, lora_alpha=5, target_modules=targets, use_dora=kind == "dora", lora_dropout=0.0,
                             fan_in_fan_out=family == "gpt2", init_lora_weights=False)  # fmt: skip
    theirs = peft.get_peft_model(model(family, num_key_value_heads=2), config, autocast_adapter_dtype=False).eval()
    theirs.save_pretrained(tmp_path)
    want = theirs(input_ids=tokens(), labels=tokens()).loss
    trained = {n: p for n, p in theirs.named_parameters() if p.requires_grad}
    want_grads = dict(zip(map(local_name, trained), torch.autograd.grad(want, [*trained.values()]), strict=True))
    adapter = fds.adapters.read(tmp_path, form=form)
    modules = [model(family, num_key_value_heads=2) for _ in range(2)]

    def run():
        axis = fds.mesh(tp=2)["tp"]
        apply, params, _ = fds.functional(modules[axis.index])
        step = fds.compose(*adapter.transforms, fds.tensor_parallel(axis), fds.sgd(1.0))(
            lambda p, b: apply(p, input_ids=b, labels=b).loss
        )
        state = step.init(adapter.beside(params))
        new, metrics = step(state, tokens())
        return metrics["loss"], step.params(state), step.params(new)

    for loss, before, after in fds.simulate(run, 2):
        torch.testing.assert_close(loss, want.detach(), rtol=1e-6, atol=1e-9)
        for name, grad in want_grads.items():
            torch.testing.assert_close(before[name] - after[name], grad, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", TARGETS)
def test_peft_reads_what_is_written(family, kind, tmp_path, quiet):
    peft = importlib.import_module("peft")
    apply, params, _ = fds.functional(model(family))
    train = ["lm_head.weight"] if family == "llama" else []
    step = fds.compose(
        fds.lora(PATTERN[family], rank=3, alpha=5, train=train, **KINDS[kind]), fds.adamw(0.05)
    )(lambda p, b: apply(p, input_ids=b, labels=b).loss)  # fmt: skip
    state = step.init(params)
    for _ in range(2):
        state, _ = step(state, tokens())
    fds.adapters.save(tmp_path, step, state)
    theirs = peft.PeftModel.from_pretrained(model(family), tmp_path, autocast_adapter_dtype=False).eval()
    loss = theirs(input_ids=tokens(), labels=tokens()).loss.detach()
    torch.testing.assert_close(loss, step.evaluate(state, tokens())["loss"], rtol=1e-6, atol=1e-9)
    merged = theirs.merge_and_unload()
    baked = fds.bake(step, state).module
    for (name, x), y in zip(merged.named_parameters(), baked.parameters(), strict=True):
        torch.testing.assert_close(y.data, x.data, rtol=1e-6, atol=1e-9, msg=name)
