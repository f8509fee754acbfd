"""What kernels copy inside themselves: the rules say what torch's profiler shows, call by call."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from preflop.measure.copies import copies_by_call
from preflop.ops.inner_copies import copies_of, result_dtype
from preflop.ops.workspace import threads, vectors
from preflop.record.subject_tape import vector_bytes_here
from preflop.tape.events import TensorMeta
from tests.copies.calls import CALLS

BY_CALL = {"aten.clone", "aten._to_copy", "aten.copy_"}


@pytest.mark.parametrize("name", CALLS)
def test_copies_inside_a_call(name):
    """Bytes and dtype of every copy kernel inside each call are those of the rules."""
    if name == "convbf" and not torch.cpu._is_amx_tile_supported():
        pytest.skip("the rule is of CPUs with AMX, whose 16-bit convolutions oneDNN makes channels last")
    with threads(torch.get_num_threads()), vectors(vector_bytes_here()):
        for call in copies_by_call(CALLS[name]):
            if call.signature.op in BY_CALL:
                continue
            real = Counter((kernel.bytes, kernel.dtype) for kernel in call.copies)
            told = Counter((copy.bytes, copy.dtype) for copy in copies_of(call.signature))
            assert real == told, call.signature


DTYPES = ["bool", "uint8", "int32", "int64", "float16", "bfloat16", "float32", "float64", "complex64"]


@pytest.mark.parametrize("first", DTYPES)
def test_promotion_is_torchs(first):
    """The dtype that two tensors, or a tensor and a number, are computed in is torch.result_type's."""
    for second in DTYPES:
        for shapes in (((2,), (2,)), ((2,), ()), ((), (2,)), ((), ())):
            metas = [
                TensorMeta(shape, (1,) * len(shape), 0, name)
                for shape, name in zip(shapes, (first, second), strict=True)
            ]
            tensors = [torch.zeros(meta.shape, dtype=getattr(torch, meta.dtype)) for meta in metas]
            assert result_dtype(metas) == str(torch.result_type(*tensors)).removeprefix("torch."), metas
    for number in (True, 2, 2.0, 2j):
        for shape in ((2,), ()):
            meta = TensorMeta(shape, (1,) * len(shape), 0, first)
            real = torch.result_type(torch.zeros(shape, dtype=getattr(torch, first)), number)
            assert result_dtype([meta, number]) == str(real).removeprefix("torch."), (first, number)
