"""Handles: any loss reads parameters that are not in memory; the same loss on plain leaves is the oracle."""

import copy
import functools
import pickle
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

import fds
from fds import tree
from fds.errors import LossError
from fds.loss.compiled import lent
from fds.step.sharding.handles import BucketWindow, Handle, handle, materialize
from tests.bits import assert_same_bits
from tests.devices import DEVICE


class Pages:
    """A source that keeps `max_live` buckets, and poisons a gathered bucket as soon as nobody holds its memory."""

    def __init__(self, buckets, max_live=2):
        self.buckets, self.max_live = buckets, max_live
        self.held, self.graves = {}, []
        self.gathers = self.alive = self.peak = 0

    def bucket(self, index):
        self.held[index] = self.held.pop(index, None) if index in self.held else self.gather(index)
        return self.held[index]

    def gather(self, index):
        while len(self.held) >= self.max_live:
            del self.held[next(iter(self.held))]
        memory = self.buckets[index].clone().numpy()
        owner = memory[:]  # lives as long as the storage that torch makes of it
        weakref.finalize(owner, self.bury, memory)
        self.gathers += 1
        self.alive += 1
        self.peak = max(self.peak, self.alive)
        return torch.from_numpy(owner)

    def bury(self, memory):
        memory.fill(-1 if memory.dtype.kind == "i" else float("nan"))
        self.graves.append(memory)  # nobody else gets this memory
        self.alive -= 1


def handles(params, max_live=2, num_buckets=7, trained=True):
    """Return a source and a tree of handles like `params`, in about `num_buckets` buckets of one dtype each.

    Parameters start at multiples of 64 bytes, as plain tensors do: matrix products round by alignment.
    """
    named = tree.paths(params)
    per_bucket = -(-len(named) // num_buckets)
    buckets, places = [], {}
    for path, x in named.items():
        last = buckets[-1] if buckets else None
        if last is None or last[0].dtype != x.dtype or len(last) >= per_bucket:
            buckets.append(last := [])
        places[path] = len(buckets) - 1, sum(y.numel() for y in last)
        last.append(F.pad(x.detach().reshape(-1), (0, -x.numel() % 16 + 16), value=77))
    pages = Pages([torch.cat(xs) for xs in buckets], max_live)
    leaves, build = tree.flatten(params)

    def make(path, x):
        requires_grad = trained and x.is_floating_point()
        window = BucketWindow.whole(path, *places[path], x.shape, x.dtype)
        return handle(pages, window, x.dtype, x.device, requires_grad)

    return pages, build([make(path, x) for path, x in zip(named, leaves, strict=True)])


def gradients(loss, params):
    """Return the loss, and the sums of what the hooks of the leaves saw."""
    seen = {}

    def hook(leaf):
        path = next(path for path, x in tree.paths(params).items() if x is leaf)
        assert type(leaf.grad) is torch.Tensor
        grad, leaf.grad = leaf.grad.to_dense() if leaf.grad.is_sparse else leaf.grad, None
        seen[path] = seen[path] + grad if path in seen else grad.clone()

    for x in tree.leaves(params):
        if x.requires_grad:
            x.register_post_accumulate_grad_hook(hook)
    torch.manual_seed(0)
    value = loss(params)
    value.backward()
    return value.detach(), seen


def plain(params):
    return tree.map(lambda x: x.detach().clone().requires_grad_(x.is_floating_point()), params)


def assert_invisible(loss, params, max_live=2):
    """Hold that handles change no bit of loss and gradients, and keep no memory afterwards."""
    want = gradients(loss, plain(params))
    pages, held = handles(params, max_live)
    assert_same_bits(gradients(loss, held), want)
    pages.held.clear()
    assert pages.alive == 0
    return pages


def rand(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)), dtype=dtype)


X = rand(3, 4)
IDS, IMAGES = torch.tensor([1, 2, 1]), rand(2, 3, 6, 6)


class Recurrent(nn.Module):
    def __init__(self, cell):
        super().__init__()
        self.cell = cell

    def forward(self, x):
        return self.cell(x)[0]


class Attention(nn.Module):
    def __init__(self, **sizes):
        super().__init__()
        self.cell = nn.MultiheadAttention(8, 2, batch_first=True, **sizes)

    def forward(self, x):
        return self.cell(x, *(x[..., : getattr(self.cell, d)] for d in ("kdim", "vdim")))[0]


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(5, 8), nn.Linear(8, 5, bias=False)
        self.head.weight = self.embed.weight
        self.unused = nn.Linear(3, 3)

    def forward(self, ids):
        return self.head(self.embed(ids)).log_softmax(-1)


MODULES = {
    "linear": (lambda: nn.Linear(8, 3), rand(2, 8)),
    "mlp": (lambda: nn.Sequential(nn.Linear(8, 9), nn.GELU(), nn.Dropout(0.5), nn.Linear(9, 3)), rand(2, 8)),
    "twice": (lambda: nn.Sequential(*[nn.Linear(8, 8)] * 2), rand(2, 8)),
    "layer norm": (lambda: nn.Sequential(nn.LayerNorm(8), nn.RMSNorm(8), nn.GroupNorm(2, 8)), rand(2, 8)),
    "embedding": (lambda: nn.Embedding(5, 4, padding_idx=1), IDS),
    "sparse embedding": (lambda: nn.Embedding(5, 4, sparse=True), IDS),
    "embedding bag": (lambda: nn.EmbeddingBag(5, 4), IDS[None]),
    "self-attention": (Attention, rand(2, 5, 8)),
    "cross-attention": (lambda: Attention(kdim=5, vdim=3), rand(2, 5, 8)),
    "encoder": (lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), rand(2, 5, 8)),
    "gru": (lambda: Recurrent(nn.GRU(8, 4, num_layers=2, bidirectional=True)), rand(5, 2, 8)),
    "lstm": (lambda: Recurrent(nn.LSTM(8, 4, num_layers=2)), rand(5, 2, 8)),
    "conv": (lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ConvTranspose2d(4, 2, 3)), IMAGES),
    "prelu": (lambda: nn.Sequential(nn.PReLU(), nn.Linear(8, 2)), rand(2, 8)),
    "tied": (Tied, IDS),
}


@pytest.mark.parametrize("name", MODULES)
def test_modules_train_alike(name):
    make, x = MODULES[name]
    torch.manual_seed(1)
    apply, params, buffers = fds.functional(make())
    assert_invisible(lambda p: apply.with_buffers(p, buffers, x)[0].square().mean(), params)


@pytest.mark.parametrize("name", MODULES)
def test_modules_evaluate_alike(name):
    make, x = MODULES[name]
    torch.manual_seed(1)
    apply, params, buffers = fds.functional(make().eval())
    pages, held = handles(params, trained=False)  # as plain ones: linear layers choose their kernel by requires_grad
    contexts = [torch.no_grad, torch.inference_mode][: 1 if buffers else 2]  # buffers' versions are asked for
    for context in contexts:
        with context():
            assert_same_bits(apply(held, x, buffers=buffers), apply(params, x, buffers=buffers))
    pages.held.clear()
    assert pages.alive == 0


class Saves(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        ctx.w = w
        return x @ w.t()

    @staticmethod
    def backward(ctx, grad):
        x, w = ctx.saved_tensors
        return grad @ w, grad.t() @ x + 0 * ctx.w


class SetsUp(torch.autograd.Function):
    @staticmethod
    def forward(x, w):
        return x @ w.t()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, grad):
        x, w = ctx.saved_tensors
        return grad @ w, grad.t() @ x


class Same(torch.autograd.Function):
    @staticmethod
    def forward(ctx, w):
        return w

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


class SameView(Same):
    @staticmethod
    def forward(ctx, w):
        return w.view_as(w)


@torch.library.custom_op("fds_test::scaled", mutates_args=())
def scaled(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(x.numpy() * w.numpy())


scaled.register_autograd(
    lambda ctx, grad: (None, grad * ctx.saved_tensors[0]),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0]),
)


def layer(x, w):
    return F.linear(x, w).tanh()


def remember_matmuls(ctx, op, *args, **kwargs):
    return CheckpointPolicy.MUST_SAVE if op is torch.ops.aten.mm.default else CheckpointPolicy.PREFER_RECOMPUTE


def penalty_on_gradients(p):
    x = X.clone().requires_grad_()
    (slope,) = torch.autograd.grad(layer(layer(x, p["a"]), p["b"]).sum(), x, create_graph=True)
    return slope.square().sum()


def own_gradient(p):
    inner = layer(X, p["a"]).square().sum()
    (grad,) = torch.autograd.grad(inner, p["a"], create_graph=True)
    return inner + (grad * p["b"]).sum()


def offloaded(p):
    with torch.autograd.graph.save_on_cpu():
        return layer(layer(X, p["a"]), p["b"]).sum()


def pieces(p):
    q, k, v = p["a"].view(-1)[:12].view(3, 4).unbind()
    rows = [*p["b"], *p["a"].split([1, 3]), *p["b"].t().chunk(2, dim=1)]
    return (q * k + v.expand(3, 4) * X).sum() + sum((i * row).sin().sum() for i, row in enumerate(rows))


def numbers(p):
    p = [p["a"].double(), p["b"].to(torch.float16).float(), p["a"].type(torch.float64), p["b"].detach(), p["b"].data]
    return sum(x.square().sum() for x in p).float() + p[3][0, 0].item() + float(p[4].max())


def converted(p):
    w = p["a"].to(torch.float64)
    w -= w.mean()  # a cast is memory of its own
    return (w.float() @ p["b"]).sin().sum()


def foreach(p):
    products = torch._foreach_mul(torch._foreach_sin(tree.leaves(p)), tree.leaves(p))
    return torch.stack(torch._foreach_norm(products)).sum()


again = functools.partial(checkpoint, use_reentrant=False)
square = lambda w: layer(X, w).square().sum()
LOSSES = {
    "matmul": lambda p: (X @ p["a"] @ p["b"]).sum(),
    "pieces": pieces,
    "numbers": numbers,
    "converted": converted,
    "stack": lambda p: torch.stack([p["a"], p["b"]]).tanh().sum() + torch.cat([p["a"].t(), p["b"]]).sin().sum(),
    "weight penalty": lambda p: sum(x.square().sum() for x in tree.leaves(p)),
    "foreach": foreach,
    "as a Parameter's data": lambda p: (nn.Parameter(p["a"]) * p["b"]).sum(),
    "attention": lambda p: F.scaled_dot_product_attention(*[p["a"][None, None]] * 2, p["b"][None, None]).sin().sum(),
    "complex": lambda p: (torch.view_as_complex(p["a"].view(4, 2, 2)).conj() * 1j).abs().sum(),
    "strided": lambda p: (p["a"][1:].as_strided((2, 3), (3, 1), 2) * p["a"].t().as_strided((2, 3), (1, 4))).sum(),
    "bits": lambda p: p["a"].sum() + p["b"].t()[1:].data.t().contiguous().view(torch.int32).sum() % 7,
    "function": lambda p: Saves.apply(Saves.apply(X, p["a"]), p["a"]).square().sum(),
    "function with setup_context": lambda p: SetsUp.apply(X, p["a"]).square().sum(),
    "function that returns its input": lambda p: (X @ Same.apply(p["a"]) @ SameView.apply(p["b"])).square().sum(),
    "custom operator": lambda p: scaled(rand(4, 4), p["a"]).square().sum(),
    "grad": lambda p: (torch.func.grad(square)(p["a"]) * p["b"]).sum(),
    "grad of a closure": lambda p: torch.func.grad(lambda x: layer(x, p["a"]).sum())(X).square().sum(),
    "grad of a function": lambda p: torch.func.grad(lambda w: SetsUp.apply(X, w).square().sum())(p["a"]).square().sum(),
    "vjp": lambda p: torch.func.vjp(layer, X, p["a"])[1](X)[1].square().sum(),
    "jacobian": lambda p: torch.func.jacrev(lambda w: layer(X, w).sum(0))(p["a"]).square().sum(),
    "hessian": lambda p: torch.func.hessian(square)(p["a"]).sin().sum(),
    "vmap": lambda p: torch.vmap(lambda row: (p["a"] @ row).tanh().sum())(X).sum(),
    "vmap over a parameter": lambda p: torch.vmap(lambda row: (row * X).tanh().sum())(p["a"]).sum(),
    "per-sample grads": lambda p: (
        torch.vmap(torch.func.grad(lambda x, w: layer(x, w).sum(), 1), (0, None))(X, p["a"]).square().sum()
    ),
    "double backward": penalty_on_gradients,
    "own gradient": own_gradient,
    "offloaded": offloaded,
    "checkpoint": lambda p: again(layer, again(layer, X, p["a"]), p["a"]).sum(),
    "nested checkpoint": lambda p: again(lambda x: layer(again(layer, layer(x, p["b"]), p["a"]), p["b"]), X).sum(),
    "selective checkpoint": lambda p: again(
        lambda x: layer(layer(x, p["b"]), p["a"]),
        X,
        context_fn=lambda: create_selective_checkpoint_contexts(remember_matmuls),
    ).sum(),
    "reentrant checkpoint": lambda p: (
        checkpoint(lambda x: layer(layer(x, p["b"]), p["a"]), X.clone().requires_grad_(), use_reentrant=True).sum()
        + p["a"].sum()
    ),
    "reentrant checkpoint, as argument": lambda p: checkpoint(layer, X, p["a"], use_reentrant=True).sum(),
    "forward mode": lambda p: torch.autograd.functional.jvp(square, p["a"], p["b"], create_graph=True)[1],
}


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")  # torch's forward mode does
@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("max_live", [1, 2])
def test_losses_train_alike(name, max_live):
    params = {"unused": rand(3), "a": rand(4, 4), "b": rand(4, 4, seed=1), "c": rand(2, 2)}
    assert_invisible(LOSSES[name], params, max_live)


def test_scalars_empty_and_integer_parameters():
    params = {"scale": rand(), "none": rand(0, 3), "index": torch.tensor([1, 2]), "w": rand(4), "at": torch.tensor(3)}

    def loss(p):
        picked = p["w"][p["index"]].sum() * p["scale"] + p["w"][p["at"]] + X[int(p["index"][0])].sum()
        return picked + p["none"].sum() + (p["none"] @ rand(3, 2)).sum() + list(range(5))[p["at"]]

    assert_invisible(loss, params)


@pytest.mark.parametrize("cache", [True, False])
def test_autocast_trains_alike(cache):
    def loss(p):
        with torch.autocast(DEVICE.type, torch.bfloat16, cache_enabled=cache):
            out = layer(layer(layer(X, p["a"]), p["b"]), p["a"])
            with torch.autocast(DEVICE.type, enabled=False):
                low = p["a"].bfloat16().float()
                low += 1
            return out.float().square().sum() + (low * p["b"]).sum()

    assert_invisible(loss, {"a": rand(4, 4), "b": rand(4, 4, seed=1)}, max_live=1)


def chain(p, x):
    for i in range(7):
        x = layer(x, p[f"{i}"])
    return x.square().sum()


def by_autocast(p, x):
    with torch.autocast(DEVICE.type, torch.bfloat16):
        return chain(p, x).float()


def by_checkpoint(p, x):
    return again(chain, p, x)


def by_lending(p, x):
    for i in range(7):
        given, scope = lent({"w": p[f"{i}"]})
        with scope:
            x = layer(x, given["w"])
        del given
    return x.square().sum()


@pytest.mark.parametrize("loss", [chain, by_autocast, by_checkpoint, by_lending])
def test_no_more_than_two_of_seven_buckets_live(loss):
    params = {f"{i}": rand(4, 4, seed=i) for i in range(7)}
    pages = assert_invisible(lambda p: loss(p, X), params)
    assert pages.peak == 2
    # Backward finds the last two in place, and asks for no gradient by the first layer's input. Recomputing is another
    # forward.
    assert pages.gathers == (7 + 4 if loss is not by_checkpoint else 7 + 7 + 4)


def test_a_graph_holds_no_memory():
    pages, held = handles({f"{i}": rand(4, 4, seed=i) for i in range(7)})
    with torch.autocast(DEVICE.type, torch.bfloat16):
        value = chain(held, X) + sum(x.square().sum() + x.t().chunk(2)[0].sin().sum() for x in held.values())
    pages.held.clear()
    assert pages.alive == 0
    value.backward()


def test_views_and_printing_gather_nothing():
    pages, held = handles({"w": rand(2, 6), "s": rand()})
    p = held["w"]
    views = [*p.chunk(2, 1), *p.unsafe_chunk(2), p.t(), p[0, 1:], p.expand(3, 2, 6), p.view(3, 4), p.diagonal()]
    views += [p.detach(), p.data, nn.Parameter(p), p.as_subclass(torch.Tensor)]
    assert all(isinstance(x, Handle) for x in views)
    assert repr(p) == str(p) == f"{p}" == "Handle('w', shape=(2, 6), dtype=torch.float32)"
    assert isinstance(p, torch.Tensor) and tree.leaves({"w": p}) == [p]
    assert p.is_leaf and p.requires_grad and p._version == 0 and p.grad is None
    assert (p.shape, p.stride(), p.dtype, p.device) == ((2, 6), (6, 1), torch.float32, DEVICE)
    assert (p.numel(), p.nbytes, p.dim(), p.storage_offset(), p.is_contiguous()) == (12, 48, 2, 0, True)
    assert p.contiguous() is p and p.to(torch.float32) is p and p.float() is p
    assert pages.gathers == 0
    assert f"{held['s']:.3f}" == f"{rand():.3f}"


def test_values_leave_as_copies():
    params = {"w": rand(2, 3), "s": rand(), "i": torch.tensor([[1, 2]])}
    pages, held = handles(params)
    w = held["w"]
    out = [w.detach().numpy(), w.tolist(), held["s"].item(), held["i"].numpy()]
    plain = [torch.from_dlpack(w.detach()), w.clone()]
    copies = [copy.deepcopy(w), copy.copy(w), pickle.loads(pickle.dumps(w)), w.cpu().clone()]
    pages.held.clear()
    assert pages.alive == 0
    assert_same_bits(plain, [params["w"]] * 2)
    assert_same_bits([x.detach() for x in copies], [params["w"]] * 4)
    assert out[0].tolist() == out[1] == params["w"].tolist()
    assert out[2] == params["s"].item() and out[3].tolist() == [[1, 2]]
    assert all(x.is_leaf and x.requires_grad and type(x) is torch.Tensor for x in copies[:3])
    assert copy.deepcopy([w, w])[0].requires_grad
    with pytest.raises(RuntimeError, match="requires grad"):
        w.numpy()


def test_materialize_gives_plain_memory_and_gradients():
    pages, held = handles({"w": rand(2, 3)})
    x = materialize(held["w"])
    assert type(x) is torch.Tensor and x.data_ptr()
    pages.held.clear()
    assert pages.alive == 0  # the copy is of this parameter alone
    (x * 2).sum().backward()
    assert_same_bits(held["w"].grad, torch.full((2, 3), 2.0))
    assert materialize(x) is x and materialize("text") == "text"


@pytest.mark.parametrize("name", ["data_ptr", "untyped_storage", "storage", "share_memory_"])
def test_asking_for_memory_is_refused(name):
    _, held = handles({"block": {"w": rand(2, 3)}})
    with pytest.raises(LossError, match=r"materialize\(p\)") as caught:
        getattr(held["block"]["w"], name)()
    assert caught.value.where == "block.w"


def iadd(p):
    p += 1


def setitem(p):
    p[0] = 1


def assign_data(p):
    p.data = rand(4)


def detached_view(p):
    p.detach().view(-1)[1:].t_()


WRITES = {
    "method": lambda p: p.mul_(2),
    "operator": iadd,
    "item": setitem,
    "data": lambda p: p.data.add_(1),
    "assigning data": assign_data,
    "detach": lambda p: p.detach().zero_(),
    "view": lambda p: p.view(2, 2).t().add_(1),
    "init": lambda p: nn.init.normal_(p),
    "copy_": lambda p: p.copy_(rand(4)),
    "set_": lambda p: p.set_(rand(3)),
    "detached view": detached_view,
}
WITHOUT_GRAD = {
    "functional": lambda p: F.relu(p, inplace=True),
    "out": lambda p: torch.add(p, 1, out=p),
    "foreach": lambda p: torch._foreach_add_([p], 1),
    "chunk": lambda p: torch.relu_(p.chunk(2)[1]),
}


@pytest.mark.parametrize("requires_grad", [True, False])
@pytest.mark.parametrize("name", WRITES | WITHOUT_GRAD)
def test_writing_over_a_parameter_is_refused(name, requires_grad):
    pages = Pages([rand(4)])
    window = BucketWindow.whole("w", 0, 0, (4,), torch.float32)
    p = handle(pages, window, torch.float32, DEVICE, requires_grad)
    contexts = [torch.no_grad, torch.inference_mode]
    if name in WRITES or not requires_grad:
        contexts.append(torch.enable_grad)
    for context in contexts:
        with context(), pytest.raises(LossError, match="the loss writes over what it is given") as caught:
            (WRITES | WITHOUT_GRAD)[name](p)
        assert caught.value.where == "w"
    assert_same_bits(p.detach().clone(), rand(4))


def test_autograd_itself_refuses_what_it_sees_first():
    _, held = handles({"w": rand(4)})
    with pytest.raises(RuntimeError, match="a leaf Variable that requires grad is being used in an in-place operation"):
        F.relu(held["w"], inplace=True)


def test_handles_may_be_written_into_other_memory():
    _, held = handles({"w": rand(4)})
    with torch.no_grad():
        out = torch.zeros(4).copy_(held["w"]).add_(held["w"])
        torch.add(out, held["w"], out=out)
    assert_same_bits(out, rand(4) + rand(4) + rand(4))


def test_flops_are_counted_alike():
    params = {f"{i}": rand(4, 4, seed=i) for i in range(7)}
    counts = []
    for p in (plain(params), handles(params)[1]):
        with FlopCounterMode(display=False) as counter:
            chain(p, X).backward()
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] > 0


def test_handles_made_in_inference_mode_train_afterwards():
    with torch.inference_mode():
        _, held = handles({"w": rand(4)})
        held["w"].view(2, 2)
    held["w"].view(2, 2).square().sum().backward()
    assert_same_bits(held["w"].grad, 2 * rand(4))


def test_a_kept_graph_runs_backward_again():
    params = {f"{i}": rand(4, 4, seed=i) for i in range(7)}
    pages, held = handles(params)
    found = []
    for p in (plain(params), held):
        value = chain(p, X)
        value.backward(retain_graph=True, inputs=tree.leaves(p))
        value.backward()
        found.append([x.grad for x in tree.leaves(p)] + list(torch.autograd.grad(chain(p, X), tree.leaves(p))))
    assert_same_bits(*found)
    assert pages.peak == 2


def test_other_kinds_of_tensors_meet_handles():
    p = handles({"w": rand(4, 4)})[1]["w"]
    ragged = torch.nested.nested_tensor([rand(2, 4), rand(3, 4)], layout=torch.jagged)
    assert_same_bits(F.linear(ragged, p).values(), F.linear(ragged.values(), rand(4, 4)))
    assert_same_bits(torch.sparse.mm(X.to_sparse(), p), torch.sparse.mm(X.to_sparse(), rand(4, 4)))


def test_reading_beyond_a_parameter_is_refused_as_ever():
    _, held = handles({"a": rand(4, 4), "b": rand(4, 4)}, num_buckets=1)
    with pytest.raises(RuntimeError, match="out of bounds for storage"):
        held["a"].as_strided((8, 8), (8, 1))


def test_an_error_of_the_operator_is_torchs():
    _, held = handles({"w": rand(4, 4)})
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        rand(2, 3) @ held["w"]
