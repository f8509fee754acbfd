"""CUDA's autocast policy on a CPU machine: the table, what each operator does, the cache, no trace."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from preflop.record import target_autocast
from preflop.record.subject_tape import record_subject
from preflop.record.target import cuda_kernels
from preflop.record.target_autocast import CUDA_ONLY_UNUSED, CUDA_POLICY, Policy
from preflop.subject import resolve
from preflop.tape.events import Tape

AMPERE = (8, 0)
MACROS = {
    "AT_FORALL_LOWER_PRECISION_FP": Policy.LOWER_PRECISION,
    "AT_FORALL_FP32": Policy.FP32,
    "AT_FORALL_FP32_SET_OPT_DTYPE": Policy.FP32_SET_OPT_DTYPE,
    "AT_FORALL_PROMOTE": Policy.PROMOTE,
}
HERE = sorted(name for name in CUDA_POLICY if target_autocast._overload(name) is not None)


def header_policy() -> dict[str, Policy]:
    """The lists of the installed torch's autocast_mode.h."""
    path = Path(torch.__file__).parent / "include" / "ATen" / "autocast_mode.h"
    if not path.is_file() or "AT_FORALL_FP32(" not in path.read_text():
        pytest.skip("this torch installs no autocast_mode.h with the lists")
    text = path.read_text().replace("\\\n", " ")
    found: dict[str, Policy] = {}
    for macro, policy in MACROS.items():
        body = re.search(rf"#define {macro}\(_\)(.*)", text)
        assert body is not None
        for entry in re.findall(r"_\((.*?)\)", body[1]):
            found[".".join(part.strip() for part in entry.split(","))] = policy
    body = re.search(r"#define AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE\(_\)(.*)", text)
    assert body is not None
    found.update(dict.fromkeys(re.findall(r'"(norm\.\w+)"', body[1]), Policy.FP32_APPEND_DTYPE))
    return found


def test_the_table_is_the_header_of_the_installed_torch() -> None:
    """CUDA_POLICY == the AT_FORALL_* lists of ATen/autocast_mode.h, plus the one that CUDA bans."""
    banned = {name: policy for name, policy in CUDA_POLICY.items() if policy is Policy.BANNED}
    assert {**header_policy(), **banned} == CUDA_POLICY


def test_the_table_is_what_torch_registers_for_cuda() -> None:
    """The operators with a kernel under AutocastCUDA == CUDA_POLICY and two that only cuDNN has."""
    registered = torch._C._dispatch_get_registrations_for_dispatch_key("AutocastCUDA")
    names = {name.removeprefix("aten::") for name in registered}
    if not names:
        pytest.skip("this torch was built without CUDA's autocast kernels")
    assert names == set(CUDA_POLICY) | CUDA_ONLY_UNUSED


# ------------------------------------------------------------------------- every listed operator


class Spy:
    """Takes an operator's place under AutogradCPU and keeps what it was called with."""

    def __init__(self, name: str) -> None:
        self.op = target_autocast._overload(name)
        self.args: tuple[Any, ...] = ()
        self.kwargs: dict[str, Any] = {}
        self.calls = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.args, self.kwargs = args, kwargs
        self.calls += 1
        results = tuple(torch.zeros(1) for _ in self.op._schema.returns)
        return results[0] if len(results) == 1 else results

    def floats(self) -> set[torch.dtype]:
        """Dtypes of every floating tensor it was given."""
        found: set[torch.dtype] = set()
        for value in (*self.args, *self.kwargs.values()):
            for item in value if isinstance(value, (list, tuple)) else (value,):
                if isinstance(item, torch.Tensor) and item.is_floating_point():
                    found.add(item.dtype)
        return found


SAMPLES: dict[str, Any] = {
    "number": 1.0, "int": 1, "bool": False, "float": 0.5, "str": "mean", "SymInt": 1,
    "List[int]": [1], "List[SymInt]": [1], "List[bool]": [False], "ScalarType": torch.int64,
}  # fmt: skip


def samples(op: Any, dtypes: list[torch.dtype]) -> tuple[list[Any], dict[str, Any]]:
    """Arguments by the schema: tensors of the dtypes in turn, and something for each that has no default."""
    turn = iter(dtypes * 20)

    def make(kind: str) -> Any:
        if kind in ("Tensor", "Optional[Tensor]"):
            return torch.ones(2, 2, dtype=next(turn))
        if kind == "List[Tensor]":
            return [make("Tensor"), make("Tensor")]
        if kind == "List[Optional[Tensor]]":
            return [torch.zeros(2, dtype=torch.int64)]
        if kind.startswith("Optional["):
            return None
        return SAMPLES[kind]

    args, kwargs = [], {}
    for argument in op._schema.arguments:
        if argument.has_default_value():
            continue
        value = make(str(argument.type))
        if argument.kwarg_only:
            kwargs[argument.name] = value
        else:
            args.append(value)
    return args, kwargs


def called_under_autocast(name: str, dtypes: list[torch.dtype], spied: str | None = None) -> Spy:
    """Call the operator as CUDA's autocast would meet it, and see what it is called with."""
    op = target_autocast._overload(name)
    spy = Spy(spied or name)
    args, kwargs = samples(op, dtypes)
    with cuda_kernels(AMPERE, lambda _: None):
        library = torch.library.Library("aten", "IMPL")
        try:
            library.impl(spied or name, spy, "AutogradCPU")
            with torch.autocast("cpu", dtype=torch.bfloat16):
                op(*args, **kwargs)
        finally:
            library._destroy()
    assert spy.calls == 1
    return spy


def of_policy(policy: Policy) -> list[str]:
    return [name for name in HERE if CUDA_POLICY[name] is policy]


MIXED = [torch.float32, torch.bfloat16]
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


@pytest.mark.parametrize("name", of_policy(Policy.LOWER_PRECISION))
def test_lower_precision_operators_see_lower_precision(name: str) -> None:
    """Every floating input of a listed operator arrives in bf16."""
    assert called_under_autocast(name, [torch.float32]).floats() == {torch.bfloat16}


@pytest.mark.parametrize("name", of_policy(Policy.FP32))
def test_fp32_operators_see_fp32(name: str) -> None:
    """Every floating input of a listed operator arrives in fp32."""
    assert called_under_autocast(name, [torch.bfloat16]).floats() == {torch.float32}


@pytest.mark.parametrize("name", of_policy(Policy.FP32_SET_OPT_DTYPE))
def test_operators_with_a_dtype_are_told_fp32(name: str) -> None:
    """The input stays bf16, and the operator is told dtype=float32."""
    spy = called_under_autocast(name, [torch.bfloat16])
    names = [argument.name for argument in spy.op._schema.arguments]
    given = dict(zip(names, spy.args, strict=False)) | spy.kwargs
    assert (spy.floats(), given["dtype"]) == ({torch.bfloat16}, torch.float32)


@pytest.mark.parametrize("name", of_policy(Policy.FP32_APPEND_DTYPE))
def test_norms_go_to_the_overload_with_a_dtype(name: str) -> None:
    """norm(x, p) becomes norm(x, p, dtype=float32), and the input stays bf16."""
    typed = f"norm.{target_autocast._FP32_APPEND_DTYPE[name]}"
    spy = called_under_autocast(name, [torch.bfloat16], spied=typed)
    assert (spy.floats(), spy.kwargs["dtype"]) == ({torch.bfloat16}, torch.float32)


@pytest.mark.parametrize("name", of_policy(Policy.PROMOTE))
def test_promoting_operators_see_the_widest(name: str) -> None:
    """fp32 beside bf16 makes all fp32; bf16 alone stays."""
    assert called_under_autocast(name, MIXED).floats() <= {torch.float32}
    assert called_under_autocast(name, [torch.bfloat16]).floats() <= {torch.bfloat16}


def test_binary_cross_entropy_is_refused_as_on_cuda() -> None:
    """binary_cross_entropy raises under autocast, with torch's words."""
    with (
        cuda_kernels(AMPERE, lambda _: None),
        torch.autocast("cpu", dtype=torch.bfloat16),
        pytest.raises(RuntimeError, match="unsafe to autocast"),
    ):
        nn.functional.binary_cross_entropy(torch.ones(2) / 2, torch.ones(2))


CPU_ONLY = sorted(target_autocast._cpu_names() - set(CUDA_POLICY))


@pytest.mark.parametrize("name", CPU_ONLY)
def test_what_only_the_cpu_casts_is_left_alone(name: str) -> None:
    """An operator of the CPU's lists alone sees its inputs as they are: bf16 stays bf16."""
    op = target_autocast._overload(name)
    tensors = [a for a in op._schema.arguments if "Tensor" in str(a.type) and not a.has_default_value()]
    expected = {torch.bfloat16} if tensors else set()
    assert called_under_autocast(name, [torch.bfloat16]).floats() == expected


# ---------------------------------------------------------------------------------- cache and trace


class Twice(nn.Module):
    """Uses one weight twice through `linear`, and once through `einsum`."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layer(self.layer(x))
        return torch.einsum("bi,oi->bo", x, self.layer.weight)


def casts_of_parameters(tape: Tape, step: int = 1) -> list[int]:
    """Storages that forward made by casting a parameter."""
    parameters = {info.storage for info in tape.parameters}
    return [
        call.storages[1]
        for call in tape.calls
        if tape.signatures[call.signature].op == "aten._to_copy"
        and call.step == step
        and call.phase.value == "forward"
        and call.storages[0] in parameters
    ]


def test_a_weight_is_cast_once_per_region_and_its_copy_dies_with_it() -> None:
    """Three uses, by torch's own kernel and by ours, share one bf16 copy, and the next step makes another."""
    tape = record_subject(resolve(Twice(), torch.ones(8, 16), precision="bf16-mixed", device="a100-80gb"))
    first, second = casts_of_parameters(tape, 0), casts_of_parameters(tape, 1)
    assert (len(first), len(second)) == (1, 1)
    died = tape.storages[second[0]].died
    assert died is not None
    assert died <= max(mark.tick for mark in tape.marks if mark.name == "backward_end")


def dumps() -> dict[str, str]:
    """Kernels that the dispatcher has for every operator that the rules touch."""
    names = {*HERE, *CPU_ONLY, "dropout", "softmax.int", "_fused_rms_norm", "prelu"}
    return {
        name: torch._C._dispatch_dump_table(f"aten::{name}")
        for name in names
        if target_autocast._overload(name) is not None
    }


class Raises(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.layer(x)
        raise ValueError("the model's own error")


def test_nothing_stays_behind() -> None:
    """The dispatcher's tables are the same before and after, also when the model raises."""
    before = dumps()
    subject = {"precision": "fp16-mixed", "device": "a100-80gb"}
    record_subject(resolve(nn.Linear(4, 4), torch.ones(2, 4), **subject))
    assert dumps() == before
    with pytest.raises(Exception, match="the model's own error"):
        record_subject(resolve(Raises(), torch.ones(2, 4), **subject))
    assert dumps() == before


def test_the_cpu_keeps_its_own_policy() -> None:
    """Recorded for the CPU, softmax under autocast stays bf16; for a GPU it is fp32."""

    def softmax_dtype(device: str) -> str:
        model = nn.Sequential(nn.Linear(8, 8), nn.Softmax(-1))
        tape = record_subject(resolve(model, torch.ones(2, 8), precision="bf16-mixed", device=device))
        found = [s for s in tape.signatures if s.op == "aten._softmax"]
        return found[0].outputs[0].dtype

    assert (softmax_dtype("cpu"), softmax_dtype("a100-80gb")) == ("bfloat16", "float32")


class Itself(nn.Module):
    """Leaves and enters CUDA's autocast by itself, as models do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cuda", enabled=False):
            x = self.layer(x)
        with torch.autocast("cuda", dtype=torch.float16):
            return self.layer(x)


@pytest.mark.parametrize("precision", ["fp32", "bf16-mixed"])
def test_a_model_may_enter_and_leave_cuda_autocast(precision: str) -> None:
    """The first layer runs in fp32 and the second in fp16, whatever surrounds them; torch.autocast is as
    before afterwards."""
    before = torch.autocast.__init__
    tape = record_subject(resolve(Itself(), torch.ones(2, 8), precision=precision, device="a100-80gb"))
    ran = [
        tape.signatures[call.signature].inputs[1].dtype
        for call in tape.steady()
        if tape.signatures[call.signature].op == "aten.addmm"
    ]
    assert ran == ["float32", "float16"]
    assert torch.autocast.__init__ is before
