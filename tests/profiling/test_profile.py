"""Counts of a step beside torch's own counter, at every stage, in pipelines, under accumulation and recomputation."""

import re
import warnings
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import fds
from fds import attention_layouts, kernels
from fds.errors import ComposeError, FdsError
from fds.kernels.choice import only
from fds.profiling.counting import counting, formula
from tests.bits import assert_same_bits
from tests.tensor_axis import splitting

WIDTH, VOCABULARY, TOKENS, ROWS = 8, 11, 6, 4
BLOCK = 2 * ROWS * TOKENS * WIDTH * WIDTH * 5  # flops of the products of matrices of a block's forward
PAIRS = ROWS * 2 * TOKENS * TOKENS * 2 * (4 + 4)  # and of its attention
HEAD = 2 * ROWS * TOKENS * WIDTH * VOCABULARY


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.first, self.last = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        q, k, v = self.qkv(x).view(len(x), TOKENS, 3, 2, 4).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        return x + self.last(torch.tanh(self.first(y)))


def criterion(out, targets):
    return F.cross_entropy(out.flatten(0, 1), targets.flatten())


def layers():
    specs = [fds.LayerSpec(nn.Embedding, VOCABULARY, WIDTH), *[fds.LayerSpec(Block) for _ in range(2)]]
    return fds.Layers([*specs, fds.LayerSpec(nn.Linear, WIDTH, VOCABULARY)], criterion)


def batch(seed=0):
    tokens = torch.randint(0, VOCABULARY, (ROWS, TOKENS), generator=torch.Generator().manual_seed(seed))
    return tokens, tokens.roll(1, 1)


def flops(profile, name=""):
    return {phase: work.flops for phase, work in profile.modules[name].work.items()}


def made(*transforms, loss=None):
    loss = layers() if loss is None else loss
    step = fds.compose(*transforms, fds.adamw(0.01))(loss)
    return step, step.init(loss.init)


FORWARD = 2 * (BLOCK + PAIRS) + HEAD
BACKWARD = 2 * (2 * BLOCK + PAIRS * 5 // 2) + 2 * HEAD


def test_a_step_counts_what_its_layers_multiply():
    step, state = made()
    profile = fds.profile(step, state, batch())
    assert flops(profile) == {"forward": FORWARD, "recomputation": 0, "backward": BACKWARD, "update": 0}
    assert flops(profile, "1") == {
        "forward": BLOCK + PAIRS, "recomputation": 0, "backward": 2 * BLOCK + PAIRS * 5 // 2, "update": 0
    }  # fmt: skip
    assert flops(profile, "2.qkv")["forward"] == 3 * BLOCK // 5
    assert flops(profile, "2.qkv")["backward"] == 6 * BLOCK // 5
    assert profile.num_parameters == profile.modules[""].num_parameters == sum(p.numel() for p in state.params.values())
    assert profile.modules["1.first"].num_parameters == WIDTH * (WIDTH + 1)
    assert profile.modules["1.first"].calls == 1 and profile.modules["1.first"].kind == "Linear"
    assert profile.total.macs == (FORWARD + BACKWARD) // 2
    hidden = 2 * PAIRS * (TOKENS - 1) // (2 * TOKENS)
    assert profile.phases["forward"].unmasked_flops == FORWARD - hidden
    assert profile.phases["backward"].unmasked_flops == BACKWARD - hidden * 5 // 2


def test_totals_are_those_of_torchs_counter():
    """It has no formula for attention on the CPU: here attention is written out."""

    class Written(Block):
        def forward(self, x):
            q, k, v = self.qkv(x).view(len(x), TOKENS, 3, 2, 4).permute(2, 0, 3, 1, 4)
            return x + self.last(torch.tanh(self.first(((q @ k.mT).softmax(-1) @ v).transpose(1, 2).flatten(2))))

    loss = fds.Layers([nn.Embedding(VOCABULARY, WIDTH), Written(), nn.Linear(WIDTH, VOCABULARY)], criterion)
    step, state = made(fds.checkpoint_activations(), fds.accumulate(2), loss=loss)
    step(state, batch())
    with FlopCounterMode(display=False) as counter:
        step(state, batch())
    assert fds.profile(step, state, batch()).total.flops == counter.get_total_flops() > 0


def test_recomputation_is_counted_by_itself():
    step, state = made(fds.checkpoint_activations(), fds.accumulate(2))
    found = flops(fds.profile(step, state, batch()))
    # torch stops where all that is saved is there: before the last product of every layer
    assert found["recomputation"] == FORWARD - HEAD - 2 * BLOCK // 5
    assert (found["forward"], found["backward"]) == (FORWARD, BACKWARD)


def test_functions_without_modules_are_counted_where_they_run():
    def loss_fn(params, batch):
        hidden = torch.utils.checkpoint.checkpoint(lambda x: torch.tanh(x @ params["a"]), batch, use_reentrant=False)
        return kernels.linear_cross_entropy(hidden, params["b"], torch.zeros(len(batch), dtype=torch.long))

    params = {"a": torch.randn(5, 6), "b": torch.randn(7, 6)}
    step = fds.compose(fds.sgd(0.1))(loss_fn)
    found = flops(fds.profile(step, step.init(params), torch.randn(4, 5)))
    first, last = 2 * 4 * 5 * 6, 2 * 4 * 6 * 7  # of the second, gradients are computed in forward
    assert found == {"forward": first + 3 * last, "recomputation": first, "backward": first, "update": 0}


def test_muon_multiplies_in_its_update():
    loss = layers()
    step = fds.compose(fds.by_name({"*.weight": fds.muon(0.01), "*": fds.adamw(0.01)}))(loss)
    assert flops(fds.profile(step, step.init(loss.init), batch()))["update"] > 0


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_every_rank_counts_its_share_at_any_stage(stage):
    def run():
        dp = fds.mesh(dp=-1)["dp"]
        step, state = made(fds.shard_optimizer(dp, stage=stage), fds.accumulate(2))
        profile = fds.profile(step, state, batch())
        assert profile.title == f"Profile of a step on rank {dp.index} of 2"
        return flops(profile), flops(profile, "1.first"), profile.num_parameters

    step, state = made()
    alone = fds.profile(step, state, batch())
    want = flops(alone), flops(alone, "1.first"), alone.num_parameters
    assert fds.simulate(run, 2) == [want, want]


def test_a_pipeline_counts_its_own_stages():
    def run():
        pp = fds.mesh(pp=2)["pp"]
        step, state = made(fds.pipeline(fds.plans.one_f_one_b, pp, num_microbatches=2, partition=[0, 2, 4]))
        return fds.profile(step, state, batch())

    first, last = fds.simulate(run, 2)
    assert set(first.modules) >= {"0", "1", "1.qkv"} and "2" not in first.modules
    assert set(last.modules) >= {"2", "2.qkv", "3"} and "1" not in last.modules
    assert flops(first)["forward"] == BLOCK + PAIRS and flops(last)["forward"] == BLOCK + PAIRS + HEAD
    assert flops(first)["backward"] + flops(last)["backward"] == BACKWARD


def test_a_tensor_axis_divides_the_flops_of_what_it_splits():
    def run(tensor):
        step = splitting.Place(tensor=tensor).step(optimizer=fds.adamw(0.01))
        state = step.init(splitting.model(None).init, key=3)
        return fds.profile(step, state, splitting.share(step, 0))

    (whole,), (half, other) = (fds.simulate(lambda n=n: run(n), n) for n in (1, 2))
    for name in ("1", "3"):  # pairs of linears, the first split by columns, the second by rows
        pieces = flops(half, name), flops(other, name)
        assert {part: n + pieces[1][part] for part, n in pieces[0].items()} == flops(whole, name)
    saved = flops(other, "1")["forward"] + flops(other, "3")["forward"]
    assert flops(half)["forward"] == flops(whole)["forward"] - saved


def test_a_profile_changes_nothing_and_donates_nothing():
    step, state = made(fds.donate())
    plain, _ = made()[0](state, batch())
    fds.profile(step, state, batch())
    assert_same_bits(step(state, batch())[0].params, plain.params)


def test_what_is_compiled_is_counted_as_it_is_written():
    module = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    apply, params, _ = fds.functional(module)
    loss_fn = lambda params, x: apply(params, x).square().mean()
    found = []
    for some in ([], [fds.compile(backend="aot_eager")], [fds.compile(backend="aot_eager", whole=True)]):
        step = fds.compose(*some, fds.sgd(0.1))(loss_fn)
        state = step.init(params)
        for _ in range(2):
            state, _ = step(state, torch.randn(5, 3))
        found.append(flops(fds.profile(step, state, torch.randn(5, 3))))
    assert found[0] == found[1] == found[2] and found[0]["forward"] == 2 * 5 * (12 + 8)


def test_two_modules_with_the_same_names_are_told_apart():
    class Net(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.fc = nn.Linear(3, width)

        def forward(self, x):
            return self.fc(x)

    (student, params, _), (teacher, fixed, _) = fds.functional(Net(2)), fds.functional(Net(2))
    loss_fn = lambda p, x: (student(p, x) - teacher(fixed, x)).square().mean()
    step = fds.compose(fds.sgd(0.1))(loss_fn)
    modules = fds.profile(step, step.init(params), torch.ones(4, 3)).modules
    assert {"fc", "Net.fc"} <= set(modules)
    assert modules["fc"].work["backward"].flops > 0 == modules["Net.fc"].work["backward"].flops


def test_no_hook_is_left_behind():
    with torch.inference_mode():  # where a linear layer is one operator, which is counted by its parts
        assert fds.profile_model(nn.Linear(3, 4), torch.ones(2, 3)).total.flops == 2 * 2 * 12
    with pytest.raises(RuntimeError):
        fds.profile_model(nn.Linear(3, 4), torch.ones(2, 5))
    assert not torch.nn.modules.module._has_any_global_hook()


def test_a_model_is_left_in_its_own_modes():
    model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(), nn.Linear(4, 2))
    model[1].eval()
    profile = fds.profile_model(model, torch.ones(2, 3))
    assert [part.training for part in model] == [True, False, True]
    assert profile.phases["forward"].flops == 2 * 2 * (12 + 8) and profile.num_parameters == 16 + 10
    assert profile.operators["aten.addmm"]["forward"].calls == 2
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in model.modules())


def test_shared_parameters_count_once():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    profile = fds.profile_model(model, torch.ones(2, 4))
    assert profile.modules[""].num_parameters == profile.num_parameters == 16 + 4 + 4


def test_grouped_convolutions_take_as_many_flops_for_each_gradient_as_forward():
    conv, x = nn.Conv2d(4, 6, 3, stride=2, padding=1, groups=2), torch.randn(2, 4, 8, 8, requires_grad=True)
    with counting() as counted:
        conv(x).sum().backward()
    found = {place.operator: work.flops for place, work in counted.done.items() if work.flops}
    forward = 2 * 2 * 6 * 4 * 4 * 2 * 9
    assert found == {"aten.convolution": forward, "aten.convolution_backward": 2 * forward}


def test_every_operator_of_ours_has_a_formula_or_multiplies_no_matrices():
    sources = (Path(kernels.__file__).parent).rglob("*.py")
    names = {name for file in sources for name in re.findall(r'@operator\(\s*"(\w+)"', file.read_text())}
    sparse = {f"sparse_attention{rows}{way}" for rows in ("", "_rows") for way in ("", "_backward")}
    products = {"flash_attention", "flash_attention_backward", "linear_cross_entropy", *sparse}
    rows = (
        "normalize normalize_backward cross_entropy cross_entropy_backward linear_cross_entropy_backward masked_softmax"
    )
    rows += " masked_softmax_backward swiglu swiglu_backward bias_gelu bias_gelu_and_derivative bias_gelu_multiply"
    rows += " bias_gelu_backward bias_dropout_add bias_dropout_add_backward rotary"
    rows += " vocabulary_statistics vocabulary_gradient fake_quantize"
    assert names == products | set(rows.split())
    kernels.flash_attention, kernels.linear_cross_entropy, kernels.sparse_attention  # noqa: B018  (defines operators)
    assert all(formula(getattr(torch.ops.fds, name)) for name in products)


def test_attention_by_its_kernel_counts_what_attention_does():
    q, k, v = (torch.empty(2, 4, n, d, device="meta") for n, d in ((5, 8), (7, 8), (7, 6)))
    kernels.flash_attention  # noqa: B018  (defines the operator)
    forward = formula(torch.ops.aten._scaled_dot_product_flash_attention)
    own = formula(torch.ops.fds.flash_attention)
    assert own(q.shape, k.shape, v.shape, out_val=None) == forward(q, k, v, out_val=None) == 2 * 8 * 5 * 7 * (8 + 6)


@pytest.mark.parametrize("kernel", ["reference", "triton"])
def test_sparse_attention_counts_pairs_of_listed_blocks(kernel):
    layout = attention_layouts.local_sliding_window(4, 5, block=16, num_sliding_window_blocks=3)
    q, k, v = (torch.randn(2, heads, 80, 16, requires_grad=True) for heads in (4, 2, 2))
    with only(kernel), counting() as counted:
        kernels.sparse_attention(q, k, v, layout).sum().backward()
    flops = [work.flops for place, work in counted.done.items() if "sparse_attention" in place.operator]
    forward = 2 * 2 * layout.nonzeros * 16 * 16 * (16 + 16)
    times = {"reference": 2.5, "triton": 3.5}[kernel]
    assert sorted(flops) == [forward, times * forward]


def test_the_table_shows_what_was_found():
    step, state = made(fds.checkpoint_activations())
    profile = fds.profile(step, state, batch(), depth=1, top=2)
    text = str(profile)
    assert "forward" in text and "recomputation" in text and "qkv" not in text and "Block" in text
    assert "flops of attention count every pair" in text
    assert "Block" in profile._repr_html_() and "<script" not in profile._repr_html_()
    short = str(fds.profile(step, state, batch(), top=0, detailed=False))
    assert "Block" not in short and "backward" in short


WRONG = {"depth": [-1, 1.0, "all", True], "top": [-1, None, 1.5], "detailed": [None, 1]}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in WRONG.items() for value in values])
def test_wrong_arguments_are_refused_before_anything_runs(name, value):
    step, state = made()
    for call in (
        lambda: fds.profile(step, state, None, **{name: value}),
        lambda: fds.profile_model(nn.Linear(1, 1), None, **{name: value}),
        lambda: fds.profiled(**{name: value}),
    ):
        with pytest.raises(FdsError) as e:
            call()
        assert e.value.where == name


def test_what_is_no_step_or_module_is_refused():
    step, state = made()
    for wrong in (nn.Linear(1, 1), None, state):
        with pytest.raises(FdsError, match="only a step"):
            fds.profile(wrong, state, batch())
    with pytest.raises(FdsError, match="only a module"):
        fds.profile_model(nn.Linear, torch.ones(1))
    with pytest.raises(FdsError):
        fds.profile(step, None, batch())
    with pytest.raises(FdsError):
        fds.profile(step, state, None)
    for arguments, where in (({"at": -1}, "at"), ({"at": 1.0}, "at"), ({"file": ""}, "file"), ({"file": 3}, "file")):
        with pytest.raises(ComposeError) as e:
            fds.profiled(**arguments)
        assert e.value.where == where


def test_one_call_is_profiled_and_the_run_is_the_same_bit_for_bit(tmp_path, capsys):
    file = tmp_path / "new" / "profile.txt"
    step, state = made(fds.profiled(1, file=file), fds.donate())
    assert f"the call after 1 is profiled, into {file}" in str(step.describe())
    plain, other = made()
    for i in range(3):
        assert file.exists() == (i > 1)
        state, _ = step(state, batch(i))
        other, _ = plain(other, batch(i))
    assert_same_bits(state.params, other.params)
    assert "Block" in file.read_text() and "forward" in file.read_text()
    assert capsys.readouterr().out == ""


def test_a_profile_that_cannot_be_written_is_printed(tmp_path, capsys):
    step, state = made(fds.profiled(0, file=tmp_path))
    with pytest.warns(UserWarning, match="the profile was not written"):
        state, _ = step(state, batch())
    assert "forward" in capsys.readouterr().out and int(state.step) == 1


def test_one_rank_prints_it(capsys):
    def run():
        step, state = made(fds.profiled(0, detailed=False), fds.shard_optimizer(fds.mesh(dp=2)["dp"], stage=2))
        step(state, batch())

    fds.simulate(run, 2)
    assert capsys.readouterr().out.count("Profile of the step after 0 calls") == 1


def test_the_key_of_a_configuration_profiles_the_step_it_names(tmp_path):
    file = tmp_path / "profile.txt"
    asked = {"enabled": True, "profile_step": 1, "module_depth": 1, "top_modules": 2, "output_file": str(file)}
    config = {"train_batch_size": ROWS, "flops_profiler": asked, "optimizer": {"type": "Adam", "params": {"lr": 0.01}}}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step, state, _, _ = fds.initialize(layers(), config=config)
    for _ in range(2):
        assert not file.exists()
        state, _ = step(state, batch())
    text = file.read_text()
    assert "Block" in text and "qkv" not in text


def test_what_a_tensor_of_its_own_kind_does_on_use_is_counted():
    """As a parameter of stage 3, which gathers: it multiplies here, so that flops tell."""

    class Product(torch.Tensor):
        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
            return func(*[torch.ones(3, 5) @ torch.ones(5, 4) if isinstance(x, cls) else x for x in args])

    x = torch.Tensor._make_wrapper_subclass(Product, (3, 4))
    with counting() as counted:
        torch.mm(torch.ones(2, 3), x)
    assert sum(work.flops for work in counted.done.values()) == 2 * 3 * 5 * 4 + 2 * 2 * 3 * 4


@pytest.mark.parametrize("stage", [None, 3])
def test_a_layer_used_twice_counts_twice_and_its_parameters_once(stage):
    def run():
        one = lambda: fds.TiedLayerSpec("one", nn.Linear, WIDTH, WIDTH)
        loss = fds.Layers([one(), torch.tanh, one()], lambda out, y: (out - y).square().mean())
        shard = [] if stage is None else [fds.shard_optimizer(fds.mesh(dp=-1)["dp"], stage=stage)]
        step, state = made(*shard, fds.precision(torch.bfloat16), loss=loss)
        return fds.profile(step, state, (torch.ones(ROWS, WIDTH), torch.ones(ROWS, WIDTH)))

    for profile in [run()] if stage is None else fds.simulate(run, 2):
        product = 2 * ROWS * WIDTH * WIDTH
        assert profile.num_parameters == WIDTH * (WIDTH + 1)
        # no gradient of the batch is wanted: two of weights, and one of what is between
        assert flops(profile) == {"forward": 2 * product, "recomputation": 0, "backward": 3 * product, "update": 0}
