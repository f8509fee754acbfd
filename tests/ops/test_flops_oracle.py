"""FLOPs against torch's own counter wherever that is right, and the coverage of torch's operators."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from preflop.ledgers.flops import flops_ledger, flops_totals
from preflop.ledgers.traffic import traffic_ledger
from tests.ops.tiny import record


def counted_by_torch(run) -> int:
    with FlopCounterMode(display=False) as counter:
        run()
    return counter.get_total_flops()


def conv_net():
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.ConvTranspose2d(8, 4, 3, stride=2),
        nn.Conv2d(4, 6, (1, 5), dilation=2),
    )


class Second(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x)[0]


class Self(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x, x, x, need_weights=True)[0]


class Einsum(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(5, 6, 7))

    def forward(self, x):
        return torch.einsum("bi,oij->boj", x, self.w)


RUNS = {
    "mlp": (lambda: nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4)), (5, 8)),
    "convolutions": (conv_net, (2, 3, 16, 16)),
    "conv1d": (lambda: nn.Conv1d(4, 6, 3, padding=1), (2, 4, 10)),
    "conv3d": (lambda: nn.Conv3d(2, 3, 3), (1, 2, 5, 6, 7)),
    "gru": (lambda: Second(nn.GRU(6, 8)), (5, 3, 6)),
    "attention with weights": (lambda: Self(nn.MultiheadAttention(16, 4, batch_first=True)), (2, 6, 16)),
    "bilinear by einsum": (Einsum, (4, 6)),
}


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("needs_grad", [False, True])
def test_equals_torchs_counter(name, needs_grad):
    """Forward and backward equal FlopCounterMode where it is right."""
    make, shape = RUNS[name]
    model, x = make(), torch.randn(shape, requires_grad=needs_grad)

    def run():
        model(x).sum().backward()

    assert flops_ledger(record(run)).total() == counted_by_torch(run) > 0


def test_fused_and_math_attention_agree():
    """Fused attention counts what the same attention by two products counts, forward and backward."""
    q, k, v = (torch.randn(2, 3, 8, 4, requires_grad=True) for _ in range(3))

    def fused():
        F.scaled_dot_product_attention(q, k, v).sum().backward()

    def by_products():
        (torch.softmax(q @ k.mT / 2.0, -1) @ v).sum().backward()

    assert flops_ledger(record(fused)).total() == counted_by_torch(by_products) > 0
    assert counted_by_torch(fused) == 0  # where torch's counter is wrong on CPU


def test_whole_and_decomposed_lstm_agree():
    """The fused LSTM counts what its cells count one by one (every gradient wanted)."""
    layer, cell = nn.LSTM(6, 8), nn.LSTMCell(6, 8)
    x, h, c = (torch.randn(s, requires_grad=True) for s in ((5, 3, 6), (1, 3, 8), (1, 3, 8)))

    def whole():
        layer(x, (h, c))[0].sum().backward()

    def by_cells():
        state, out = (h[0], c[0]), []
        for step in x:
            state = cell(step, state)
            out.append(state[0])
        torch.stack(out).sum().backward()

    assert flops_ledger(record(whole)).total() == counted_by_torch(by_cells) > 0


def test_sparse_int8_complex_and_vectors():
    """What torch's counter leaves out: sparse, int8, dot, mv, addmv, addr, and complex in full."""
    dense = torch.randn(8, 4)
    i8 = torch.ones(32, 16, dtype=torch.int8)
    z = torch.randn(4, 4, dtype=torch.complex64)
    runs = {
        lambda: torch._int_mm(i8, i8.t()): 2 * 32 * 16 * 32,
        lambda: torch.dot(dense[:, 0], dense[:, 1]): 16,
        lambda: torch.mv(dense, dense[0]): 64,
        lambda: torch.addmv(dense[:, 0], dense, dense[0]): 64,
        lambda: torch.addr(dense, dense[:, 0], dense[0]): 64,
        lambda: z @ z: 8 * 64,
    }
    assert {run: flops_ledger(record(run)).total() for run in runs} == runs


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
def test_sparse_product_with_gradient(layout):
    """Each stored element meets one row: 2·8·4 forward and 2·8·4 for the dense factor's gradient."""
    sparse, dense = torch.eye(8).to_sparse(layout=layout), torch.randn(8, 4, requires_grad=True)

    def run():
        torch.sparse.mm(sparse, dense).sum().backward()

    tape = record(run)
    assert flops_ledger(tape).total() == 2 * 2 * 8 * 4
    assert flops_totals(tape).estimates == {}


OPTIMIZERS = {
    "adamw loop": lambda p: torch.optim.AdamW(p, foreach=False),
    "adamw foreach": lambda p: torch.optim.AdamW(p, foreach=True),
    "adamw fused": lambda p: torch.optim.AdamW(p, fused=True),
    "adam amsgrad": lambda p: torch.optim.Adam(p, amsgrad=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "sgd fused": lambda p: torch.optim.SGD(p, lr=0.1, fused=True),
    "adagrad": torch.optim.Adagrad,
    "rmsprop": torch.optim.RMSprop,
    "adafactor": torch.optim.Adafactor,
    "nadam": torch.optim.NAdam,
    "radam": torch.optim.RAdam,
    "adadelta": torch.optim.Adadelta,
    "adamax": torch.optim.Adamax,
    "rprop": torch.optim.Rprop,
    "asgd": torch.optim.ASGD,
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_is_priced(name):
    """No operator of torch's optimizers is unknown; each step does arithmetic and moves bytes."""
    model = nn.Linear(4, 4)
    optimizer = OPTIMIZERS[name](model.parameters())

    def run():
        model(torch.ones(2, 4)).sum().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    tape = record(run)
    totals = flops_totals(tape)
    assert totals.unknown == {}
    assert totals.by_kind["other"] > 0
    assert traffic_ledger(tape).total() > 0


LAYERS = {
    nn.GroupNorm(2, 4): (2, 4, 6, 6),
    nn.InstanceNorm2d(4): (2, 4, 6, 6),
    nn.LayerNorm(6): (2, 6),
    nn.RMSNorm(6): (2, 6),
    nn.BatchNorm1d(4): (3, 4),
    nn.MaxPool2d(2): (1, 2, 4, 4),
    nn.AvgPool2d(2): (1, 2, 4, 4),
    nn.AdaptiveAvgPool2d(2): (1, 2, 4, 4),
    nn.AdaptiveMaxPool2d(2): (1, 2, 4, 4),
    nn.Upsample(scale_factor=2, mode="bilinear"): (1, 2, 4, 4),
    nn.Upsample(scale_factor=2): (1, 2, 4, 4),
    nn.Upsample(scale_factor=2, mode="bicubic"): (1, 2, 4, 4),
    nn.ReflectionPad2d(1): (1, 2, 4, 4),
    nn.PixelShuffle(2): (1, 4, 2, 2),
    nn.Dropout(0.5): (2, 4),
    nn.Softmax(-1): (2, 4),
    nn.LogSoftmax(-1): (2, 4),
    nn.GLU(): (2, 4),
    nn.SiLU(): (2, 4),
    nn.Mish(): (2, 4),
    nn.ELU(): (2, 4),
    nn.SELU(): (2, 4),
    nn.CELU(): (2, 4),
    nn.Hardswish(): (2, 4),
    nn.Hardsigmoid(): (2, 4),
    nn.Hardtanh(): (2, 4),
    nn.ReLU6(): (2, 4),
    nn.LeakyReLU(): (2, 4),
    nn.PReLU(): (2, 4),
    nn.Softplus(): (2, 4),
    nn.LogSigmoid(): (2, 4),
    nn.Tanh(): (2, 4),
    nn.Sigmoid(): (2, 4),
    nn.GELU("tanh"): (2, 4),
    nn.Softsign(): (2, 4),
    nn.Threshold(0.1, 0.0): (2, 4),
    nn.Unfold(2): (1, 2, 4, 4),
    nn.Fold((4, 4), 2): (1, 8, 9),
    nn.CosineSimilarity(): (2, 4),
}


@pytest.mark.parametrize("layer", LAYERS, ids=str)
def test_every_layer_is_priced(layer):
    """No operator of torch's common layers is unknown, forward or backward."""
    x = torch.randn(LAYERS[layer], requires_grad=True)

    def run():
        out = layer(x, x) if isinstance(layer, nn.CosineSimilarity) else layer(x)
        out.sum().backward()

    assert flops_totals(record(run)).unknown == {}


LOSSES = {
    "cross_entropy": lambda x: F.cross_entropy(x, torch.tensor([0, 1, 2]), label_smoothing=0.1),
    "cross_entropy images": lambda x: F.cross_entropy(
        x.view(1, 4, 3, 1), torch.zeros(1, 3, 1, dtype=torch.long)
    ),
    "mse": lambda x: F.mse_loss(x, x.detach() * 2),
    "l1": lambda x: F.l1_loss(x, x.detach() * 2),
    "smooth_l1": lambda x: F.smooth_l1_loss(x, x.detach() * 2),
    "huber": lambda x: F.huber_loss(x, x.detach() * 2),
    "bce": lambda x: F.binary_cross_entropy(x.sigmoid(), torch.ones(3, 4)),
    "bce logits": lambda x: F.binary_cross_entropy_with_logits(x, torch.ones(3, 4)),
    "kl": lambda x: F.kl_div(x.log_softmax(-1), torch.ones(3, 4), reduction="batchmean"),
    "ctc": lambda x: F.ctc_loss(
        x.log_softmax(-1).view(3, 1, 4), torch.tensor([[1, 2]]), torch.tensor([3]), torch.tensor([2])
    ),
    "embedding bag": lambda x: F.embedding_bag(torch.tensor([[0, 1]]), x).sum(),
    "cdist": lambda x: torch.cdist(x, x.detach() + 1).sum(),
    "triplet": lambda x: F.triplet_margin_loss(x, x.detach() + 1, x.detach() + 2),
}


@pytest.mark.parametrize("name", LOSSES)
def test_every_loss_is_priced(name):
    """No operator of torch's common losses is unknown, forward or backward."""
    x = torch.randn(3, 4, requires_grad=True)
    assert flops_totals(record(lambda: LOSSES[name](x).backward())).unknown == {}


def test_names_are_torchs():
    """Every family of names in the tables has a member that torch knows (a typing error has none)."""
    from preflop.ops import pointwise, view

    known = {name.split("::")[1].split(".")[0] for name in torch._C._dispatch_get_all_op_names()}
    tables = (pointwise.PER_RESULT, pointwise.GRADIENTS, pointwise.PER_INPUT)
    names = [name for table in tables for names in table.values() for name in names.split()]
    wrong = [
        name
        for name in (*names, *view.FREE)
        if not {name, f"{name}_", f"_foreach_{name}", f"_foreach_{name}_"} & known
    ]
    # Names come and go between torch versions; a few are allowed to be missing in an older one.
    assert len(wrong) <= 25, wrong


def test_ops_and_ledgers_need_no_torch():
    """Pricing a tape imports neither torch nor numpy."""
    code = (
        "import sys, preflop.ledgers.flops, preflop.ledgers.traffic, preflop.ledgers.copies, "
        "preflop.ledgers.operators; print([m for m in ('torch', 'numpy') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def test_solvers_count_what_their_loops_do():
    """Triangular solve and Cholesky are LAPACK's counts, which equal those of the written-out loops."""

    def total(fn, *tensors):
        counted = flops_totals(record(fn, *tensors))
        assert not counted.unknown
        return counted.by_kind["other"]

    triangle, given = torch.rand(3, 8, 8), torch.rand(3, 8, 5)
    solved = total(lambda a, b: torch.linalg.solve_triangular(a, b, upper=False), triangle, given)
    # Row i of one column: i multiplies, i subtractions, one division.
    assert solved == 3 * 5 * sum(2 * i + 1 for i in range(8))
    # Column j of L: a root, and for each row i >= j a product of length j; below it a division.
    loop = sum(1 + 2 * j + (8 - 1 - j) * (2 * j + 1) for j in range(8))
    assert total(lambda a: torch.linalg.cholesky_ex(a).L, triangle) == 3 * loop
    assert total(torch.linalg.inv, triangle) == 3 * 2 * 8**3
    assert total(torch.linalg.solve, triangle, given) == 3 * (2 * 8**3 // 3) + 3 * 2 * 8**2 * 5
