"""The step: loss weighted by tokens, one update or none, and what each case from the field asks."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from preflop.errors import BadSubject
from preflop.models.initialise import initialise
from preflop.record.recompute import apply_recompute, blocks_of
from preflop.trainer.batches import Microbatch
from preflop.trainer.config import TrainConfig
from preflop.trainer.model import TokenLoss, make_model, refuse_batch_norm, trained_facts
from preflop.trainer.optimizer import make_optimizer
from preflop.trainer.processes import Processes
from preflop.trainer.schedule import Scheduler, WarmupCosine
from preflop.trainer.step import Training, train_step

VOCAB, SEQUENCE = 32, 8


def config(**changed: Any) -> TrainConfig:
    return TrainConfig(**{"data": "d", "out": "o", "steps": 9, "warmup_steps": 0, "seq": SEQUENCE, **changed})


def small_model(
    dtype: torch.dtype = torch.float32, recompute: str = "none", dropout: float = 0.0
) -> TokenLoss:
    facts = trained_facts(config(dropout=dropout), VOCAB)
    model = make_model(facts, dtype, recompute)
    initialise(model.model, 0)
    return model


def training(model: nn.Module, optimizer: torch.optim.Optimizer, **changed: Any) -> Training:
    schedule = WarmupCosine(optimizer.param_groups[0]["lr"], 0.1, 0, 9)
    parts = {
        "model": model, "optimizer": optimizer, "scheduler": Scheduler(optimizer, schedule),
        "scaler": torch.amp.GradScaler("cpu", enabled=False), "processes": Processes(),
        "device": torch.device("cpu"), "autocast_dtype": None, "clip": 1.0, "seed": 0, **changed,
    }  # fmt: skip
    return Training(**parts)


def microbatch(rows: int, seed: int = 0, ignored: int = 0) -> Microbatch:
    ids = torch.randint(VOCAB, (rows, SEQUENCE + 1), generator=torch.Generator().manual_seed(seed))
    labels = ids[:, 1:].contiguous()
    labels.flatten()[:ignored] = -100
    return Microbatch(ids[:, :-1].contiguous(), labels, ids.numpy()[:, 0])


def nothing(moment: str, step: int, index: int) -> None:
    """Observes nothing."""


class Watch:
    """Keeps the gradients as they are before they are dropped."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.grads = model, {}

    def __call__(self, moment: str, step: int, index: int) -> None:
        if moment == "backward_end":
            self.grads = {
                name: one.grad.clone() for name, one in self.model.named_parameters() if one.grad is not None
            }


def gradients(
    model: nn.Module, batches: list[Microbatch], **changed: Any
) -> tuple[dict[str, torch.Tensor], float]:
    watch = Watch(model)
    run = training(model, torch.optim.SGD(model.parameters(), lr=0.0), clip=0.0, **changed)
    outcome = train_step(run, batches, 0, watch)
    return watch.grads, outcome.loss


@pytest.mark.parametrize("sizes", [(4, 4), (1, 3, 4), (2, 2, 2, 2)])
def test_microbatches_add_up_to_the_one_big_batch(sizes: tuple[int, ...]) -> None:
    """K microbatches of unequal label counts: gradients (1e-6 in fp64) and loss of one batch (L01)."""
    whole = microbatch(8, ignored=13)
    ids, labels = whole.input_ids.split(sizes), whole.labels.split(sizes)
    parts = [Microbatch(a, b, whole.samples) for a, b in zip(ids, labels)]
    model = small_model().double()
    one, loss = gradients(model, [whole])
    many, other = gradients(model, parts)
    assert one.keys() == many.keys()
    assert max((one[name] - many[name]).abs().max() for name in one) < 1e-6
    assert loss == pytest.approx(other, rel=1e-6)
    means = [
        functional.cross_entropy(model.model(a).logits.flatten(0, 1), b.flatten()).item()
        for a, b in zip(ids, labels)
    ]
    assert sum(means) / len(means) != pytest.approx(loss, rel=1e-4) or sizes == (8,)


def test_means_over_one_and_three_tokens_weigh_one_and_three() -> None:
    """Means of 4.0 over 1 token and 2.0 over 3 make 2.5, not 3.0 (L01's plain numbers)."""

    class Sums(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Parameter(torch.ones(()))

        def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            return self.one * (4.0 if (labels != -100).sum() == 1 else 6.0)

    labels = [torch.tensor([[1, -100, -100, -100]]), torch.tensor([[1, 1, 1, -100]])]
    batches = [Microbatch(one, one, one.numpy()) for one in labels]
    model = Sums()
    assert train_step(training(model, torch.optim.SGD(model.parameters())), batches, 0, nothing).loss == 2.5


def test_recomputation_changes_no_bit() -> None:
    """Loss and gradients with recomputed blocks equal those without, dropout included (L15)."""
    plain, again = small_model(dropout=0.2), small_model(recompute="block", dropout=0.2)
    batches = [microbatch(4, seed) for seed in range(2)]
    one, loss = gradients(plain, batches)
    two, other = gradients(again, batches)
    assert loss == other
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_recomputing_reaches_parameters_whose_input_is_data() -> None:
    """The non-reentrant form is used: a block fed with data gets its gradients (L17)."""
    model = nn.Sequential(*[nn.Sequential(nn.Linear(4, 4)) for _ in range(2)])
    blocks = nn.ModuleList([nn.TransformerEncoderLayer(4, 1, 4, batch_first=True) for _ in range(2)])
    apply_recompute(blocks, "block")
    hidden = torch.randn(2, 3, 4)
    for block in blocks:
        hidden = block(hidden)
    hidden.sum().backward()
    assert all(parameter.grad is not None for parameter in blocks.parameters())
    del model


def test_batch_norm_in_a_recomputed_block_is_refused() -> None:
    """Its statistics would be updated twice: a clear error instead (L16)."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(4)

    with pytest.raises(BadSubject, match=r"batch norm \(norm\).*updated twice"):
        refuse_batch_norm(blocks_of(nn.ModuleList([Block(), Block()])))


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_a_step_without_finite_gradients_changes_nothing(bad: float) -> None:
    """No update, decay, moment, step count or rate changes; the step is told as not taken (L19)."""
    model = small_model()
    run = training(model, make_optimizer(model.parameters(), config()))
    train_step(run, [microbatch(4)], 0, nothing)
    before = copy.deepcopy((model.state_dict(), run.optimizer.state_dict(), run.scheduler.state_dict()))
    hook = model.model.final_norm.weight.register_hook(lambda grad: grad * bad)
    outcome = train_step(run, [microbatch(4)], 1, nothing)
    hook.remove()
    assert not outcome.taken
    assert outcome.tokens == 4 * SEQUENCE
    after = (model.state_dict(), run.optimizer.state_dict(), run.scheduler.state_dict())
    assert all(torch.equal(before[0][name], after[0][name]) for name in before[0])
    assert str(before[1:]) == str(after[1:])
    assert all(parameter.grad is None for parameter in model.parameters())
    assert train_step(run, [microbatch(4)], 2, nothing).taken


class Product(nn.Module):
    """Loss: the sum of two weights times a number that stands in the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return self.weight.sum() * ids.float().mean()


def product_batch(value: float) -> Microbatch:
    return Microbatch(torch.tensor([[value]]), torch.zeros(1, 1, dtype=torch.int64), torch.zeros(1).numpy())


def test_the_schedule_waits_for_a_taken_step() -> None:
    """First step overflows: parameters and rate stay, scale 65536 -> 32768; next is the first rate (L05)."""
    model = Product()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = training(model, optimizer, scaler=torch.amp.GradScaler("cpu", init_scale=2.0**16))
    first = train_step(run, [product_batch(float("inf"))], 0, nothing)
    assert (first.taken, run.scaler.get_scale(), run.scheduler.taken) == (False, 32768.0, 0)
    assert model.weight.tolist() == [1.0, 1.0]
    second = train_step(run, [product_batch(1.0)], 1, nothing)
    assert (second.taken, second.learning_rate, run.scheduler.taken) == (True, 0.1, 1)


def test_a_scaler_that_was_loaded_unscales_at_once() -> None:
    """After a resume the first step works with the saved scale, and a skipped one still updates it (L06)."""
    model = Product()
    run = training(model, torch.optim.SGD(model.parameters(), lr=0.1), scaler=torch.amp.GradScaler("cpu"))
    train_step(run, [product_batch(float("inf"))], 0, nothing)
    saved = run.scaler.state_dict()
    fresh = training(model, torch.optim.SGD(model.parameters(), lr=0.1), scaler=torch.amp.GradScaler("cpu"))
    fresh.scaler.load_state_dict(saved)
    assert train_step(fresh, [product_batch(float("nan"))], 1, nothing).taken is False
    assert fresh.scaler.get_scale() == saved["scale"] / 2
    assert train_step(fresh, [product_batch(2.0)], 2, nothing).taken is True


def test_clipping_clips_the_gradients() -> None:
    """The norm recomputed after clipping is at most 1 + 1e-6, and the one logged is that before (L25)."""
    model, seen = small_model(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def norm_at_step(*_: object) -> None:
        grads = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        seen.append(nn.utils.get_total_norm(grads).item())

    optimizer.register_step_pre_hook(norm_at_step)
    outcome = train_step(training(model, optimizer), [microbatch(4)], 0, nothing)
    assert outcome.grad_norm > 1
    assert seen[0] <= 1 + 1e-6


def test_autocast_is_opened_anew_for_each_forward() -> None:
    """Under bf16 autocast the loss falls: no stale copy of a weight is used (L18)."""
    model = small_model()
    run = training(model, torch.optim.AdamW(model.parameters(), lr=1e-2), autocast_dtype=torch.bfloat16)
    losses = [train_step(run, [microbatch(8), microbatch(8)], step, nothing).loss for step in range(15)]
    assert losses[-1] < 0.8 * losses[0]


@pytest.mark.parametrize("precision", ["bf16-fp32-states", "bf16-master"])
def test_wide_updates_follow_the_group_and_the_schedule(precision: str) -> None:
    """States are fp32, the rate of the group is obeyed, and decay leaves vectors alone."""
    model = small_model(torch.bfloat16)
    optimizer = make_optimizer(model.parameters(), config(precision=precision, learning_rate=0.0))
    before = copy.deepcopy(model.state_dict())
    train_step(training(model, optimizer), [microbatch(4)], 0, nothing)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    for state in optimizer.state.values():
        assert {value.dtype for value in state.values()} == {torch.float32}
        assert ("master" in state) == (precision == "bf16-master")
    optimizer = make_optimizer(model.parameters(), config(precision=precision, learning_rate=1e-2))
    train_step(training(model, optimizer), [microbatch(4)], 0, nothing)
    assert not torch.equal(before["model.lm_head.weight"], model.state_dict()["model.lm_head.weight"])


def test_a_master_copy_keeps_what_bf16_would_lose() -> None:
    """Many small updates add up in the master copy and vanish without one."""
    moved = {}
    for precision in ("bf16-fp32-states", "bf16-master"):
        weight = nn.Parameter(torch.ones(1, 1, dtype=torch.bfloat16))
        made = config(precision=precision, learning_rate=1e-3, weight_decay=0.0, optimizer="sgd")
        optimizer = make_optimizer([weight], made)
        for _ in range(20):
            weight.grad = torch.ones_like(weight)
            optimizer.step()
        moved[precision] = weight.item()
    assert moved == {"bf16-fp32-states": 1.0, "bf16-master": pytest.approx(0.98, abs=0.004)}


def test_a_tied_weight_is_in_one_group_that_decays() -> None:
    """Groups are filled in module order; matrices decay, biases and norms do not (L24)."""
    model = small_model()
    optimizer = make_optimizer(model.parameters(), config())
    decayed, others = (group["params"] for group in optimizer.param_groups)
    assert sum(parameter is model.model.lm_head.weight for parameter in decayed) == 1
    assert len(decayed) + len(others) == len(list(model.parameters()))
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
    assert all(parameter.ndim == 1 for parameter in others)


def test_the_schedule_resumes_where_it_was() -> None:
    """The rate before and after a resume is the same: neither restarted nor counted twice (L21)."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)
    schedule = WarmupCosine(1.0, 0.1, 10, 100)
    one = Scheduler(optimizer, schedule)
    for _ in range(3):
        one.step()
    assert one.rate == pytest.approx(0.4)
    two = Scheduler(torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0), schedule)
    two.load_state_dict(one.state_dict())
    assert two.rate == one.rate
    assert two._optimizer.param_groups[0]["lr"] == one.rate
