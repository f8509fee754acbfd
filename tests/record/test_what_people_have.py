"""What people's models contain: each is recorded, or refused by the name of the operator."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import preflop
from preflop.errors import PreflopError
from preflop.ledgers.flops import flops_ledger
from preflop.tape.events import Phase
from tests.cases.new_bytes import new_peak, parameters


def same_cost(one, other, batch, **options):
    """Two ways to write one model cost the same."""
    a, b = (preflop.account(model, batch, **options) for model in (one, other))
    assert a.memory.peak_bytes == b.memory.peak_bytes
    assert a.memory.columns == b.memory.columns
    assert a.flops.model == b.flops.model
    return a


def small() -> nn.Sequential:
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))


# -- compiled and scripted code --------------------------------------------------------------------


@pytest.mark.parametrize("how", ["module", "inner", "compile method", "function"])
def test_compiled_code_is_recorded_eagerly(how, monkeypatch):
    """torch.compile'd parts are recorded as the Python they are, and nothing is compiled."""
    import torch._dynamo

    def refuse(*_args, **_kwargs):
        raise AssertionError("compiled while recording")

    plain, x = small(), torch.randn(4, 16)
    if how == "module":
        compiled = torch.compile(plain, backend=refuse)
    elif how == "inner":
        compiled = nn.Sequential(torch.compile(plain, backend=refuse))
        plain = nn.Sequential(plain)
    elif how == "compile method":
        compiled = small()
        compiled.compile(backend=refuse)
    else:
        step = torch.compile(lambda m, y: m(y), backend=refuse)

        class Calls(nn.Module):
            def __init__(self):
                super().__init__()
                self.inner = small()

            def forward(self, y):
                return step(self.inner, y)

        compiled = Calls()
    same_cost(compiled, plain, x)
    assert flops_ledger(preflop.record(compiled, x)).total() == flops_ledger(preflop.record(plain, x)).total()


def test_compiled_in_a_factory():
    """A factory that compiles its model."""
    same_cost(lambda: torch.compile(small()), small(), torch.randn(4, 16))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_scripted_module():
    """A module from torch.jit.script inside a model is recorded or refused by name."""
    model = nn.Sequential(torch.jit.script(small()), nn.Linear(16, 4))
    plain = nn.Sequential(small(), nn.Linear(16, 4))
    x = torch.randn(4, 16)
    try:
        account = preflop.account(model, x)
    except PreflopError as error:
        assert "jit" in str(error).lower() or "script" in str(error).lower()
        return
    assert account.flops.model == preflop.account(plain, x).flops.model
    assert (
        account.memory.columns.parameters.bytes == preflop.account(plain, x).memory.columns.parameters.bytes
    )


# -- torch.nn --------------------------------------------------------------------------------------


def test_nn_transformer():
    """nn.Transformer, source and target."""
    model = nn.Transformer(32, 4, 1, 1, 64, batch_first=True)
    account = preflop.account(model, (torch.randn(2, 8, 32), torch.randn(2, 6, 32)))
    assert account.flops.unknown == {}
    assert account.flops.backward > account.flops.forward


@pytest.mark.parametrize("need_weights", [True, False])
def test_multihead_attention(need_weights):
    """nn.MultiheadAttention with a padding mask, with and without its weights."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.MultiheadAttention(32, 4, batch_first=True)

        def forward(self, x, padding):
            return self.a(x, x, x, key_padding_mask=padding, need_weights=need_weights)[0]

    padding = torch.zeros(2, 8, dtype=torch.bool)
    padding[0, 5:] = True
    account = preflop.account(Model(), (torch.randn(2, 8, 32), padding))
    projections = 2 * 2 * 8 * 32 * 32 * 4
    scores = 2 * 2 * 2 * 8 * 8 * 32
    assert flops_ledger(account.tape).by("phase")["forward"] == projections + scores


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_embedding_bag(mode):
    """EmbeddingBag with offsets."""
    model = nn.EmbeddingBag(50, 8, mode=mode)
    account = preflop.account(model, (torch.randint(0, 50, (10,)), torch.tensor([0, 3, 7])))
    assert account.memory.columns.gradients.bytes == 50 * 8 * 4
    assert account.flops.unknown == {}


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_packed_sequences(kind):
    """Recurrent layers over sequences of known, unlike lengths."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.r = kind(8, 16, 2, batch_first=True, bidirectional=True)

        def forward(self, x, lengths):
            packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
            out, _ = self.r(packed)
            return pad_packed_sequence(out, batch_first=True)[0]

    account = preflop.account(Model(), (torch.randn(3, 7, 8), torch.tensor([7, 3, 5])))
    assert account.flops.model > 0
    assert account.memory.columns.gradients.bytes == account.memory.columns.parameters.bytes


def test_ctc_loss():
    """CTC with known lengths, forward and backward."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.l = nn.Linear(8, 20)

        def forward(self, x, targets, input_lengths, target_lengths):
            scores = self.l(x).log_softmax(-1)
            return F.ctc_loss(scores, targets, input_lengths, target_lengths)

    batch = (
        torch.randn(30, 2, 8), torch.randint(1, 20, (2, 10)), torch.tensor([30, 25]), torch.tensor([10, 7]),
    )
    account = preflop.account(Model(), batch)
    assert account.memory.columns.gradients.bytes == (8 * 20 + 20) * 4


# -- values ----------------------------------------------------------------------------------------


def test_boolean_indexing_both_ways():
    """Reading and writing by a known mask, forward and backward: the sizes are those of the mask."""
    mask = torch.tensor([[True, False, True], [False, False, True]])

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.l = nn.Linear(8, 8)
            self.empty = nn.Parameter(torch.zeros(8))

        def forward(self, x, mask):
            h = self.l(x)
            h = h.clone()
            h[~mask] = self.empty
            return h[mask].pow(2).sum() + h.masked_select(mask[..., None]).sum()

    account = preflop.account(Model(), (torch.randn(2, 3, 8), mask))
    assert account.flops.unknown == {}
    taken = [s.outputs[0].shape for s in account.tape.signatures if s.op == "aten.index"]
    assert (3, 8) in taken
    assert account.tape.assumptions == []


def test_layer_drop():
    """Layer drop and drop path: the draw is a real one, so a branch is taken as in a run."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

        def forward(self, x):
            for layer in self.layers:
                if torch.rand(1).item() < 0.0:
                    continue
                keep = x.new_empty((x.shape[0], 1)).bernoulli_(0.9)
                x = x + layer(x) * keep / 0.9
            return x

    account = preflop.account(Model(), torch.randn(2, 8))
    assert flops_ledger(account.tape).by("phase")["forward"] == 4 * 2 * 2 * 8 * 8


@pytest.mark.parametrize("where", ["module", "imported"])
def test_initialisers_in_a_factory(where):
    """Initialisers that read values back (trunc_normal_, orthogonal_, sparse_) do nothing while a model is
    built for recording, also when they were imported by name."""
    from torch.nn.init import orthogonal_, trunc_normal_

    def build():
        layer, table = nn.Linear(8, 8), nn.Embedding(10, 8)
        if where == "module":
            nn.init.trunc_normal_(layer.weight, std=0.02)
            nn.init.orthogonal_(table.weight)
            nn.init.sparse_(layer.weight, 0.1)
        else:
            trunc_normal_(layer.weight, std=0.02)
            orthogonal_(table.weight)
        layer.weight.data.normal_(0, 0.02)
        layer.weight.data = layer.weight.data * 0.5
        with torch.no_grad():
            layer.bias.fill_(0.1)
            layer.weight[0].zero_()
        if layer.weight.isnan().any():
            raise ValueError("bad initialisation")
        return nn.Sequential(table, layer)

    account = preflop.account(build, torch.zeros(2, 3, dtype=torch.int64))
    assert account.memory.columns.parameters.elements == 80 + 72


@pytest.mark.parametrize(
    ("change", "width"),
    [
        (lambda m: m.half(), 2),
        (lambda m: m.to(torch.bfloat16), 2),
        (lambda m: m.to(dtype=torch.float64), 8),
        (lambda m: m.bfloat16().float(), 4),
        (lambda m: m.to("cpu"), 4),
    ],
    ids=["half", "to bfloat16", "to float64", "and back", "to cpu"],
)
def test_dtypes_in_a_factory(change, width):
    """`.half()` and `.to(...)` inside a factory work on fake modules."""
    account = preflop.account(
        lambda: change(small()), lambda: change(nn.ParameterList([torch.zeros(4, 16)]))[0].data
    )
    assert account.memory.columns.parameters.bytes == account.memory.columns.parameters.elements * width


def test_lora_on_a_factory():
    """peft's LoRA on a factory's model: only the adapters have gradients and states."""
    peft = pytest.importorskip("peft")

    class Base(nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.v = nn.Linear(32, 32), nn.Linear(32, 32)

        def forward(self, x):
            return self.q(x) + self.v(x)

    def build():
        return peft.get_peft_model(Base(), peft.LoraConfig(r=4, target_modules=["q", "v"]))

    by_factory = preflop.account(build, torch.randn(2, 32))
    adapters = 2 * 2 * 4 * 32
    assert by_factory.memory.columns.gradients.elements == adapters
    assert parameters(by_factory.tape)[0] == 2 * (32 * 32 + 32) + adapters
    by_module = preflop.account(build(), torch.randn(2, 32))
    assert by_module.memory.peak_bytes == by_factory.memory.peak_bytes


# -- autograd --------------------------------------------------------------------------------------


def test_in_place_on_views():
    """Writing into slices of a buffer keeps one storage and a correct backward."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.l = nn.Linear(8, 4)

        def forward(self, x):
            out = x.new_zeros(x.shape[0], 8)
            out[:, :4] = self.l(x)
            out[:, 4:].add_(self.l(x)).mul_(2)
            return out.sum()

    account = preflop.account(Model(), torch.randn(2, 8))
    assert account.memory.columns.gradients.bytes == (32 + 4) * 4
    assert flops_ledger(account.tape).by("phase") == {"forward": 2 * 128, "backward": 2 * 128}


class Square(torch.autograd.Function):
    """A function of the user's own that saves its input."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return 2 * x * grad


def test_custom_function():
    """torch.autograd.Function: its calls are found, forward and backward, and what it saves is kept."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.l = nn.Linear(64, 64)

        def forward(self, x):
            return Square.apply(self.l(x)).sum()

    account = preflop.account(Model(), torch.randn(16, 64))
    assert account.memory.columns.activations.bytes == 16 * 64 * 4 + 4
    muls = [c for c in account.tape.calls if account.tape.signatures[c.signature].op == "aten.mul"]
    assert Phase.BACKWARD in {call.phase for call in muls}


def test_functional_call():
    """torch.func.functional_call with stand-in parameters."""
    model, x = nn.Linear(8, 4), torch.randn(2, 8)
    values = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    tape = preflop.record(lambda: torch.func.functional_call(model, values, (x,)).sum().backward())
    assert flops_ledger(tape).total() == 2 * 128
    assert all(value.grad is None for value in values.values())


def test_functorch():
    """vmap, grad, jvp and hessian are recorded, or refused by name; nothing stays broken."""
    model, x = nn.Linear(8, 8), torch.randn(2, 8)
    weight = torch.randn(8, 8)
    ways = {
        "vmap": lambda: torch.func.vmap(lambda row: torch.mv(weight, row))(x),
        "grad": lambda: torch.func.grad(lambda w: (x @ w).pow(2).sum())(weight),
        "jvp": lambda: torch.func.jvp(lambda y: model(y).tanh(), (x,), (x,)),
        "per sample": lambda: torch.func.vmap(
            torch.func.grad(lambda w, row: (row @ w).pow(2).sum()), (None, 0)
        )(weight, x),
    }
    for name, way in ways.items():
        tape = preflop.record(way)
        assert flops_ledger(tape).total() > 0, name
    assert torch.equal(torch.func.vmap(lambda row: row * 2)(x), x * 2)


def test_complex_and_fourier():
    """Complex parameters and FFTs, forward and backward."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.randn(9, dtype=torch.complex64))

        def forward(self, x):
            return torch.fft.irfft(torch.fft.rfft(x) * self.w, n=16)

    account = preflop.account(Model(), torch.randn(4, 16))
    assert account.memory.columns.parameters.bytes == 9 * 8
    assert account.memory.columns.gradients.bytes == 9 * 8


def test_flex_attention():
    """One kernel forward and one backward, with grouped heads and a block mask's attended pairs."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, 128, 128, device="cpu")

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.kv = nn.Linear(64, 64), nn.Linear(64, 64)
            self.bias = nn.Parameter(torch.zeros(4, 128, 128))

        def forward(self, x):
            bias = self.bias
            q = self.q(x).view(2, 128, 4, 16).transpose(1, 2)
            k, v = self.kv(x).view(2, 128, 2, 2, 16).unbind(2)
            return flex_attention(
                q, k.transpose(1, 2), v.transpose(1, 2), block_mask=mask, enable_gqa=True,
                score_mod=lambda score, b, h, i, j: score + bias[h, i, j],
            )

    account = preflop.account(Model(), torch.randn(2, 128, 64))
    dense = 4 * 2 * 4 * 128 * 128 * 16
    assert account.flops.by_kind["attention"] == 3 * dense
    assert account.flops.model - account.flops.attended == 3 * dense - 3 * dense * 129 // 256
    assert account.memory.columns.gradients.bytes == account.memory.columns.parameters.bytes
    assert account.flops.unknown == {}


def test_gradients_of_a_penalty():
    """A gradient penalty inside a model's loss."""
    critic = nn.Sequential(nn.Linear(8, 16, bias=False), nn.Tanh(), nn.Linear(16, 1, bias=False))
    x = torch.randn(4, 8, requires_grad=True)

    def loss(output):
        (gradient,) = torch.autograd.grad(output.sum(), leaves, create_graph=True)
        return gradient.norm() + output.mean()

    class Critic(nn.Module):
        def __init__(self):
            super().__init__()
            self.c = critic

        def forward(self, y):
            nonlocal leaves
            leaves = y
            return self.c(y)

    leaves = x
    account = preflop.account(Critic(), x, loss=loss)
    assert account.flops.model > 0


def test_checkpointed_reentrant():
    """Both kinds of checkpointing recompute, and lower the peak."""
    from torch.utils.checkpoint import checkpoint

    model, x = nn.Sequential(*[small() for _ in range(4)]), torch.randn(512, 16, requires_grad=True)

    def run(reentrant):
        y = x
        for block in model:
            y = y * 1 if reentrant is None else y
            y = block(y) if reentrant is None else checkpoint(block, y, use_reentrant=reentrant)
        y.sum().backward()

    plain = new_peak(preflop.record(run, None))
    for reentrant in (True, False):
        tape = preflop.record(run, reentrant)
        assert new_peak(tape) < plain
        assert Phase.RECOMPUTE in {call.phase for call in tape.calls}


def test_sparse_gradients():
    """Sparse embedding gradients are recorded, or refused by name."""
    model = nn.Embedding(100, 8, sparse=True)
    try:
        account = preflop.account(model, torch.randint(0, 100, (2, 3)), optimizer="sgd")
    except PreflopError as error:
        assert "sparse" in str(error)
    else:
        assert account.flops.model == 0
