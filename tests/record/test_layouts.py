"""Layouts: a fake result lies in memory as the real kernel's does."""

from __future__ import annotations

import pytest
import torch

from preflop.record.fake import FakeKernels, flatten_result

aten = torch.ops.aten


def layouts() -> dict[str, torch.Tensor]:
    """One shape, laid out in four ways."""
    plain = torch.randn(2, 8, 6, 6)
    return {
        "contiguous": plain,
        "channels last": plain.to(memory_format=torch.channels_last),
        "transposed": plain.transpose(2, 3),
        "permuted": torch.randn(6, 8, 2, 6).permute(2, 1, 0, 3),
    }


def operators():
    """(gradient, input) -> results, of backward kernels and element-wise functions."""
    w, stats = torch.ones(8), torch.zeros(2, 4)
    rows = torch.zeros(2, 8, 6, 1)
    return {
        "layer_norm_backward": lambda g, x: aten.native_layer_norm_backward(
            g, x, [6], rows, rows + 1, torch.ones(6), torch.ones(6), [True] * 3
        ),
        "group_norm_backward": lambda g, x: aten.native_group_norm_backward(
            g, x, stats, stats + 1, w, 2, 8, 36, 4, [True] * 3
        ),
        "batch_norm_backward": lambda g, x: aten.native_batch_norm_backward(
            g, x, w, None, None, w, w, True, 1e-5, [True] * 3
        ),
        "softmax_backward": lambda g, x: aten._softmax_backward_data(g, x, -1, torch.float32),
        "log_softmax_backward": lambda g, x: aten._log_softmax_backward_data(g, x, -1, torch.float32),
        "gelu_backward": lambda g, x: aten.gelu_backward(g, x),
        "silu_backward": lambda g, x: aten.silu_backward(g, x),
        "relu_backward": lambda g, x: aten.threshold_backward(g, x, 0),
        "hardswish_backward": lambda g, x: aten.hardswish_backward(g, x),
        "elu_backward": lambda g, x: aten.elu_backward(g, 1, 1, 1, False, x),
        "add": lambda g, x: aten.add(g, x),
        "where": lambda g, x: aten.where(g > 0, g, x),
        "softmax": lambda g, x: aten._softmax(g, -1, False),
        "dropout": lambda g, x: aten.native_dropout(g, 0.5, True),
        "cat": lambda g, x: aten.cat([g, x], 1),
        "layer_norm": lambda g, x: aten.native_layer_norm(g, [6], torch.ones(6), torch.ones(6), 1e-5),
        "batch_norm": lambda g, x: aten.native_batch_norm(g, w, w, None, None, True, 0.1, 1e-5),
        "max_pool": lambda g, x: aten.max_pool2d_with_indices(g, 2),
        "upsample": lambda g, x: aten.upsample_bilinear2d(g, [12, 12], False),
        "cumsum": lambda g, x: aten.cumsum(g, 1),
        "sort": lambda g, x: aten.sort(g, 1),
        "convolution": lambda g, x: aten.convolution(
            g, torch.ones(4, 8, 3, 3), None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1
        ),
    }


@pytest.mark.parametrize("op", operators())
def test_fake_results_lie_as_real_ones(op):
    """For every pair of layouts the strides of all results are equal."""
    from preflop.record.recorder import Recorder

    function = operators()[op]
    for gradient_layout, gradient in layouts().items():
        for input_layout, x in layouts().items():
            real = [t.stride() for t in flatten_result(function(gradient, x))[0]]
            recorder = Recorder()
            with recorder:
                fakes = [recorder.kernels.like(t) for t in (gradient, x)]
                fake = [t.stride() for t in flatten_result(function(*fakes))[0]]
            assert fake == real, (gradient_layout, input_layout)


def test_the_kernels_alone_do_not():
    """The correction is needed: torch's own fake layer-norm backward lays its result out otherwise."""
    kernels = FakeKernels()
    gradient = kernels.empty((2, 64, 32), (2048, 1, 64), torch.float32)
    x = kernels.empty((2, 64, 32), (2048, 32, 1), torch.float32)
    row = kernels.empty((2, 64, 1), (64, 1, 1), torch.float32)
    weight = kernels.empty((32,), (1,), torch.float32)
    with kernels.mode:
        found = aten.native_layer_norm_backward(gradient, x, [32], row, row, weight, weight, [True] * 3)
    assert found[0].stride() == (2048, 1, 64) or torch.__version__ >= "2.14"


def test_one_pixel_images_leave_batch_norm_contiguous() -> None:
    """(2, 8, 1, 1) lies both ways at once; the real kernel then gives the contiguous strides."""
    x = torch.rand(2, 8, 1, 1).to(memory_format=torch.channels_last)
    w = torch.ones(8)
    real = aten.native_batch_norm(x, w, w, None, None, True, 0.1, 1e-5)[0]
    kernels = FakeKernels()
    args = [kernels.like(tensor) for tensor in (x, w, w)]
    arguments = (*args, None, None, True, 0.1, 1e-5)
    plan, _ = kernels.plan(aten.native_batch_norm.default, arguments, {}, args)
    assert real.stride() == plan.outputs[0].stride != x.stride()
