"""The evaluator: polynomials of a whole step, equal to the account of the concrete or recorded one."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from preflop.account import Account
from preflop.accounting import account_tape, find_device
from preflop.errors import BadNumber
from preflop.hardware.device import Device
from preflop.plan.choices import Choices
from preflop.plan.evaluate import Evaluator, _unexceeded
from preflop.plan.outcome import Outcome, outcome_of
from preflop.plan.prices import OVER, points, whole_value
from preflop.tape.sizes import Domain, NotPolynomial, Span, basis, value
from preflop.tapes.store import index, parametric
from preflop.transforms.accumulation import accumulate
from preflop.transforms.depth import deepen

MODEL = "gpt2-nano"
CAPABILITY = [9, 0]
ENTRIES = [entry for entry in index() if MODEL in entry["models"] and CAPABILITY in entry["capabilities"]]
FILES = [entry["file"] for entry in ENTRIES]
MANY = [entry["file"] for entry in ENTRIES if entry["models"][MODEL]["most_batch"] is None]
COUNTED = (
    "peak_bytes", "peak_phase", "flops_model", "flops_hardware", "flops_total", "read_bytes", "write_bytes",
)  # fmt: skip
TIMED = ("lower_s", "expected_s", "upper_s")
H100 = "h100-sxm5-80gb"


def device(name: str = H100) -> Device:
    found = find_device(name)
    assert found is not None
    return found


def accounted(file: str, batch: int, seq: int, microbatches: int, on: Device | None) -> Account:
    """The account of the concrete tape."""
    found = parametric(file, MODEL)
    tape = found.at(batch, seq)
    for stack in found.stacks:
        tape = deepen(tape, stack)
    return account_tape(accumulate(tape, microbatches=microbatches), on)


def differs(found: Outcome, wanted: Outcome) -> list[str]:
    """Names of the figures that differ: counts at all, times by more than rounding."""
    wrong = [name for name in COUNTED if getattr(found, name) != getattr(wanted, name)]
    return wrong + [name for name in TIMED if not same_time(getattr(found, name), getattr(wanted, name))]


def same_time(one: float | None, other: float | None) -> bool:
    if one is None or other is None:
        return one is other
    return one == pytest.approx(other, rel=1e-12)


EVALUATORS: dict[str, Evaluator] = {}


def evaluator(file: str) -> Evaluator:
    if file not in EVALUATORS:
        EVALUATORS[file] = Evaluator(parametric(file, MODEL))
    return EVALUATORS[file]


CALIBRATED = """schema = "preflop.calibration/3"
measured_at = "today"
[device]
name = "A CPU"
vendor = "CPU"
arch = "cpu"
records_as = "cpu"
serial = true
threads = 1
[figures]
torch_total_memory_bytes = 8e9
memory_bandwidth_bytes_per_s = 1e10
[peaks]
float32 = 1e11
bfloat16 = 1e12
[launch]
launch_s = 1e-6
optimizer_launch_s = 5e-7
smallest_kernel_s = 0.0
[pages]
from_bytes = 100000
s_per_byte = 1e-9
[curves]
elementwise = [[1e3, 0.1], [1e6, 0.9]]
[curves.ops]
"aten.gelu(tanh) float32" = [[1e3, 0.01], [1e6, 0.1]]
[curves.surfaces]
"matmul float32" = [[1e6, 1e5, 0.5], [1e8, 1e6, 0.9]]
"matmul bfloat16" = [[1e6, 1e5, 0.5], [1e8, 1e6, 0.9]]
[curves.products]
"aten.mm(NT) float32" = [[32, 32, 32, 0.1], [32, 32, 512, 0.2], [32, 512, 32, 0.3], [32, 512, 512, 0.4],
  [512, 32, 32, 0.5], [512, 32, 512, 0.6], [512, 512, 32, 0.7], [512, 512, 512, 0.8]]
"""


@pytest.mark.parametrize("file", FILES)
def test_times_on_this_machine_equal_the_accounts(
    file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Grids of products, variants, lists of tensors and new pages: the arithmetic is the account's."""
    (tmp_path / "this.toml").write_text(CALIBRATED, "utf-8")
    monkeypatch.setenv("PREFLOP_CALIBRATION", str(tmp_path / "this.toml"))
    on, fresh = device("this"), Evaluator(parametric(file, MODEL))
    batch = fresh.domain.least_batch
    for microbatches in (1, 3):
        wanted = outcome_of(accounted(file, batch, 64, microbatches, on))
        found = fresh.evaluate(batch, 64, microbatches=microbatches, device=on)
        assert wanted.expected_s is not None
        assert not differs(found, wanted)


@settings(max_examples=8, deadline=None)
@given(
    file=st.sampled_from(FILES),
    batch=st.integers(1, 300),
    seq=st.integers(2, 256),
    microbatches=st.sampled_from((1, 1, 2, 3)),
)
def test_equals_the_account_of_the_concrete_tape(file: str, batch: int, seq: int, microbatches: int) -> None:
    """Any size, any number of microbatches: evaluated == accounted, to the byte and the FLOP."""
    found = evaluator(file)
    batch = 1 if found.domain.most_batch == 1 else max(batch, found.domain.least_batch)
    seq = max(found.domain.spans[0].multiple, seq // found.domain.spans[0].multiple * found.domain.spans[0].multiple)
    if not found.holds(batch, seq):
        return
    made = found.evaluate(batch, seq, microbatches=microbatches, device=device())
    wanted = outcome_of(accounted(file, batch, seq, microbatches, device()))
    assert differs(made, wanted) == []
    assert (made.tokens, made.samples) == (wanted.tokens, wanted.samples)


@pytest.mark.parametrize("name", ["a100-sxm4-80gb", "mi300x", "l4", "rtx-4090"])
def test_times_follow_the_device(name: str) -> None:
    """Times from arrays == times from rows, on devices with other peaks, other vendors, no figures."""
    on = device(name)
    wanted = outcome_of(accounted(MANY[0], 4, 128, 1, on))
    assert differs(evaluator(MANY[0]).evaluate(4, 128, device=on), wanted) == []


def test_without_a_device_there_is_no_time() -> None:
    """No device: counts as with one, times None."""
    found = evaluator(MANY[0]).evaluate(4, 128)
    assert found.time_s is None
    assert found.flops_model == evaluator(MANY[0]).evaluate(4, 128, device=device()).flops_model


def test_more_microbatches_keep_the_peak_and_scale_the_work() -> None:
    """Peak of 2 == of 9; each further microbatch adds the same FLOPs and bytes."""
    two, three, nine = (evaluator(MANY[0]).evaluate(2, 64, microbatches=n) for n in (2, 3, 9))
    assert two.peak_bytes == three.peak_bytes == nine.peak_bytes
    for name in ("flops_model", "flops_total", "read_bytes", "write_bytes"):
        one = getattr(three, name) - getattr(two, name)
        assert getattr(nine, name) == getattr(two, name) + 7 * one


@pytest.mark.parametrize(("batch", "seq", "microbatches"), [(2, 48, 3), (1, 200, 1)])
def test_equals_what_is_recorded(batch: int, seq: int, microbatches: int) -> None:
    """Evaluated == recorded anew at that size, accumulation included."""
    from preflop.folding import tape_of
    from preflop.subject import resolve

    size = {"batch_size": batch, "sequence_length": seq}
    subject = resolve(MODEL, size, precision="bf16-mixed", microbatches=microbatches, device=H100)
    recorded = outcome_of(account_tape(tape_of(subject), device()))
    files = [f for f in FILES if "bf16-mixed" in f]
    model = Choices({"none": [parametric(file, MODEL) for file in files]})
    assert differs(model.evaluate(batch, seq, microbatches=microbatches, device=device()), recorded) == []


@pytest.mark.long
@pytest.mark.parametrize("mode", ["block", "selective"])
def test_recomputation_equals_what_is_recorded(mode: str) -> None:
    """A parametric tape of each recomputation mode: evaluated == recorded, one and many microbatches."""
    import preflop
    from preflop.choosing import choices

    model = choices(MODEL, recompute=(mode,), precision="bf16-mixed", device=H100)
    for batch, seq, microbatches in ((3, 64, 1), (2, 128, 4), (1, 32, 2)):
        recorded = preflop.account(
            MODEL, {"batch_size": batch, "sequence_length": seq}, precision="bf16-mixed", device=H100,
            recompute=mode, microbatches=microbatches,
        )  # fmt: skip
        found = model.evaluate(batch, seq, microbatches=microbatches, recompute=mode, device=device())
        assert differs(found, outcome_of(recorded)) == []


def test_sizes_that_were_not_verified_are_refused() -> None:
    """A sequence beyond the position table, or a mode without a tape: refused, not extrapolated."""
    model = Choices({"none": [parametric(MANY[0], MODEL)]})
    with pytest.raises(NotPolynomial, match=r"(?s)batch 4, sequence 512.*Verified: .*batch 2 and more, seq 2 to 256"):
        model.evaluate(4, 512)
    with pytest.raises(NotPolynomial, match="'block'"):
        model.evaluate(4, 128, recompute="block")


@pytest.mark.parametrize("wrong", [-2, 0, 1.5, "8", float("nan"), True])
@pytest.mark.parametrize("what", ["batch", "seq", "microbatches"])
def test_numbers_that_are_no_counts_are_refused(what: str, wrong: object) -> None:
    """Batch, sequence and microbatches: whole numbers of at least 1, and one message for all others."""
    model = Choices({"none": [parametric(MANY[0], MODEL)]})
    sizes = {"batch": 4, "seq": 128, "microbatches": 2} | {what: wrong}
    with pytest.raises(BadNumber, match=f"{what} is .*; it must be a whole number of at least 1"):
        model.evaluate(**sizes)


def test_a_float_that_is_whole_is_a_count() -> None:
    """4.0 == 4, and numpy's integers are integers."""
    import numpy as np

    model = Choices({"none": [parametric(MANY[0], MODEL)]})
    wanted = model.evaluate(4, 128, microbatches=2)
    assert model.evaluate(4.0, np.int64(128), microbatches=2.0) == wanted  # type: ignore[arg-type]


def test_the_device_that_choices_were_made_for_is_evaluated() -> None:
    """Named once, it gives the time of every evaluation; another may be named for one."""
    from preflop.choosing import choices

    model = choices(MODEL, recompute="none", precision="bf16-mixed", device="h100-sxm")
    found = model.evaluate(4, 128)
    assert found.expected_s is not None
    assert found == model.evaluate(4, 128, device=device())
    assert model.evaluate(4, 128, device=device("h200")).lower_s != found.lower_s


@pytest.mark.parametrize(("batch", "fits"), [(8, None), (4096, False)])
def test_what_surely_does_not_fit(batch: int, fits: bool | None) -> None:
    """More tensors than the device has memory: it does not fit, as the account says; else it is not judged."""
    import preflop
    from preflop.choosing import choices

    device = find_device("rtx-4090")
    assert device is not None
    made = choices("gpt2-nano", recompute="none", device="rtx-4090")
    found = made.evaluate(batch, 256)
    assert found.fits is fits
    assert (found.peak_bytes > device.memory_bytes) is (fits is False)
    if fits is False:
        size = {"batch_size": batch, "sequence_length": 256}
        assert preflop.account("gpt2-nano", size, device="rtx-4090").memory.fits is False


def test_only_unexceeded_moments_are_kept() -> None:
    """A row that another reaches in every coefficient is dropped; of equal rows the first stays."""
    import numpy as np

    rows = np.array([[1, 0], [2, 1], [1, 5], [2, 1], [0, 0], [1, 4]])
    assert _unexceeded(rows).tolist() == [1, 2]


@given(st.lists(st.lists(st.integers(-9, 9), min_size=6, max_size=6), min_size=1, max_size=12))
def test_no_peak_is_dropped(rows: list[list[int]]) -> None:
    """At every size the largest kept row == the largest row."""
    import numpy as np

    kept = [rows[i] for i in _unexceeded(np.array(rows))]
    for size in ((1, 1), (1, 9), (7, 2), (50, 60)):
        at = basis(*size)
        assert max(value(tuple(r), at) for r in kept) == max(value(tuple(r), at) for r in rows)


def test_halves_add_up_to_whole_numbers() -> None:
    """Causal pairs B S (S + 1) / 2 are whole at every size; what is not whole is refused."""
    half = OVER // 2
    assert whole_value((0, 0, 0, half, 0, half), basis(3, 5)) == 45
    with pytest.raises(NotPolynomial):
        whole_value((half, 0, 0, 0, 0, 0), basis(1, 1))


@pytest.mark.parametrize(
    "domain",
    [
        Domain(), Domain(2), Domain(1, 1), Domain(2, None, (Span(2, 256),)),
        Domain(1, 1, (Span(128, 1024, 128),)), Domain(2, None, (Span(8),)), Domain(1, None, (Span(96, 512, 96),)),
        Domain(2, None, (Span(128, 500, 128),)), Domain(1, None, (Span(2, 512), Span(8, 448, 8))),
    ],
)
def test_prices_are_asked_inside_the_domain(domain: Domain) -> None:
    """Every size at which a price is fitted or verified is one that the tape holds for."""
    found = points(domain)
    assert all(domain.holds(*size) for size in found.all)
    assert len(found.fitted) == len(found.terms)
