"""Analysis leaves no trace: the user's model, randomness, hooks and settings are bit for bit as before."""

from __future__ import annotations

import copy
import gc
import logging
import random
import sys
import warnings

import numpy as np
import pytest
import torch
import torch.nn.modules.module as torch_module
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

import preflop
from preflop.errors import BadSubject

FakeTensorMode()  # what torch imports for the first one sets warning filters of its own

GLOBAL_HOOKS = (
    "_global_forward_pre_hooks",
    "_global_forward_hooks",
    "_global_forward_hooks_always_called",
    "_global_forward_hooks_with_kwargs",
    "_global_backward_hooks",
    "_global_backward_pre_hooks",
    "_global_module_registration_hooks",
    "_global_parameter_registration_hooks",
    "_global_buffer_registration_hooks",
)


def model_with_state() -> nn.Sequential:
    """Batch norm (buffers), dropout (randomness), a frozen layer, a hook and a gradient."""
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Dropout(0.5), nn.Flatten(),
        nn.Linear(144, 5),
    )
    model.train()
    model[1].eval()
    model[5].bias.requires_grad_(False)
    model[0].weight.grad = torch.randn_like(model[0].weight)
    model[0].register_forward_hook(lambda *_: None)
    model[5].weight.register_hook(lambda grad: grad * 2)
    model.note = "mine"
    return model


def world() -> dict[str, object]:
    """What a program could notice outside of its model."""
    return {
        "torch": torch.get_rng_state().tolist(),
        "python": random.getstate(),
        "numpy": str(np.random.get_state()),
        "hooks": [dict(getattr(torch_module, name)) for name in GLOBAL_HOOKS if hasattr(torch_module, name)],
        "initialisers": {name: getattr(nn.init, name) for name in dir(nn.init)},
        "functions": (torch.get_rng_state, torch.compile, torch.tensor, torch.set_rng_state),
        "gc": (gc.isenabled(), gc.get_threshold()),
        "gradients": torch.is_grad_enabled(),
        "autocast": (torch.is_autocast_enabled("cpu"), torch.is_autocast_cache_enabled()),
        "dtype": torch.get_default_dtype(),
        "device": torch.get_default_device(),
        "modes": len(_get_current_dispatch_mode_stack()),
        "log": logging.getLogger("torch._subclasses.fake_tensor").level,
        "path": list(sys.path),
        "filters": list(warnings.filters),
        "threads": torch.get_num_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }


def portrait(model: nn.Module) -> dict[str, object]:
    """What a program could notice of its model."""
    return {
        "state": {name: (tensor.clone(), tensor.data_ptr()) for name, tensor in model.state_dict().items()},
        "grads": {
            n: (p.grad, None if p.grad is None else p.grad.clone()) for n, p in model.named_parameters()
        },
        "flags": [(name, module.training) for name, module in model.named_modules()],
        "wants": [(name, p.requires_grad, type(p), id(p)) for name, p in model.named_parameters()],
        "vars": {name: sorted(vars(module)) for name, module in model.named_modules()},
        "forwards": {name: type(module).forward for name, module in model.named_modules()},
        "hooks": {
            name: (len(module._forward_hooks), len(module._forward_pre_hooks), len(module._backward_hooks))
            for name, module in model.named_modules()
        },
        "versions": {name: tensor._version for name, tensor in model.state_dict(keep_vars=True).items()},
    }


def same(before: dict[str, object], after: dict[str, object]) -> None:
    """Holds two portraits against each other, tensors by value and place."""
    assert before.keys() == after.keys()
    for key, value in before.items():
        if key == "state":
            for name, (tensor, place) in value.items():
                assert torch.equal(tensor, after[key][name][0]), name
                assert place == after[key][name][1], name
        elif key == "grads":
            for name, (grad, values) in value.items():
                assert grad is after[key][name][0], name
                assert grad is None or torch.equal(values, after[key][name][1]), name
        else:
            assert value == after[key], key


def no_fakes(model: nn.Module) -> None:
    """No fake tensor is left in the user's module."""
    for tensor in [*model.parameters(), *model.buffers()]:
        assert not isinstance(tensor, FakeTensor)
        assert not isinstance(tensor.grad, FakeTensor) if tensor.is_leaf else True


def ways(model: nn.Module, x: torch.Tensor):
    """Every way to analyse one model."""
    targets = torch.tensor([1, 2])

    def loss(output):
        return nn.functional.cross_entropy(output, targets)

    return {
        "account": lambda: preflop.account(model, x, loss=loss),
        "on a device": lambda: preflop.account(
            model, x, loss=loss, device="h100-sxm", precision="bf16-mixed"
        ),
        "half": lambda: preflop.account(model, x, loss=loss, precision="bf16", microbatches=2),
        "record forward": lambda: preflop.record(model, x),
        "record backward": lambda: preflop.record(lambda: loss(model(x)).backward()),
        "record a step": lambda: preflop.record(lambda: one_step(model, x, loss)),
        "callable": lambda: preflop.account(lambda: copy.deepcopy(model), x, loss=loss),
    }


def one_step(model, x, loss):
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1, momentum=0.9)
    loss(model(x)).backward()
    optimizer.step()
    optimizer.zero_grad()


WAYS = list(ways(nn.Identity(), torch.zeros(1)))


@pytest.mark.parametrize("way", WAYS)
def test_s01_s02_s04_nothing_changes(way):
    """State, buffers, gradients, flags, hooks, randomness and settings are as before."""
    model, x = model_with_state(), torch.randn(2, 3, 8, 8)
    before_model, before_x = portrait(model), x.clone()
    before = world()
    ways(model, x)[way]()
    after = world()
    for key, value in before.items():
        assert value == after[key], key
    same(before_model, portrait(model))
    no_fakes(model)
    assert torch.equal(x, before_x)
    assert x.grad is None
    assert model[1].num_batches_tracked.item() == 0


def test_s02_the_next_random_number():
    """The next draws equal those of a program that never analysed."""

    class Dropping(nn.Sequential):
        def forward(self, x):
            if torch.rand(1).item() < 2 and random.random() < 2 and np.random.rand() < 2:
                return super().forward(x)
            return x

    model = Dropping(nn.Linear(8, 8), nn.Dropout(0.5))
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    expected = torch.rand(1), random.random(), np.random.rand()
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    preflop.account(model, torch.zeros(2, 8))
    assert (torch.rand(1), random.random(), np.random.rand()) == expected


class Breaking(nn.Module):
    """Raises in the middle of forward."""

    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)

    def forward(self, x):
        self.norm(self.first(x))
        self.count = 1
        raise RuntimeError("in the middle")


FAILURES = {
    "forward raises": lambda m, x: preflop.account(m, x),
    "recorded forward raises": lambda m, x: preflop.record(m, x),
    "bad loss": lambda m, x: preflop.account(m.first, x, loss=lambda y: y),
    "loss without gradient": lambda m, x: preflop.account(m.first, x, loss=lambda y: y.detach().mean()),
    "batch does not fit": lambda m, x: preflop.account(m.first, torch.zeros(2, 5)),
    "factory raises": lambda m, x: preflop.account(lambda: 1 / 0, x),
    "backward raises": lambda m, x: preflop.account(m.first, x, loss=raising_backward),
    "optimizer raises": lambda m, x: preflop.account(m.first, x, optimizer=lambda p: 1 / 0),
}


class _Raises(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.sum()

    @staticmethod
    def backward(ctx, grad):
        raise RuntimeError("in backward")


def raising_backward(output):
    return _Raises.apply(output)


@pytest.mark.parametrize("failure", FAILURES)
def test_nothing_changes_when_it_fails(failure):
    """Also after an exception everything is as before."""
    model, x = Breaking(), torch.randn(3, 4)
    before_model, before = portrait(model), world()
    with pytest.raises((BadSubject, RuntimeError)):
        FAILURES[failure](model, x)
    after = world()
    for key, value in before.items():
        assert value == after[key], key
    allowed = failure == "recorded forward raises"  # it runs the user's own code on the user's module
    if allowed:
        vars(model).pop("count", None)
    same(before_model, portrait(model))
    no_fakes(model)


def test_s04_flags_are_read_not_set():
    """A frozen norm in a training model is recorded as one that does not learn."""
    model = nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3))
    model.train()
    model[1].eval()
    tape = preflop.account(model, torch.randn(2, 3, 4, 4)).tape
    norm = next(s for s in tape.signatures if s.op == "aten.native_batch_norm")
    training = norm.args[5]
    assert training is False
    assert [module.training for module in model.modules()] == [True, True, False]


def test_s07_no_mode_stays_active():
    """No dispatch mode, compiler stance or hook stays behind to slow the program down."""
    torch.compile(nn.Linear(2, 2))
    from torch._dynamo.eval_frame import _stance

    before = _stance.stance
    preflop.account(nn.Linear(4, 4), torch.randn(2, 4))
    preflop.record(torch.matmul, torch.randn(2, 2), torch.randn(2, 2))
    from torch._dynamo.eval_frame import _stance as after

    assert after.stance == before
    assert _get_current_dispatch_mode_stack() == []


def test_real_tensors_of_a_recording_stay_real():
    """A recorded step on the user's own tensors leaves them usable: the next real step works."""
    model, x = nn.Linear(4, 4), torch.randn(2, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    preflop.record(lambda: (model(x).sum().backward(), optimizer.step(), optimizer.zero_grad()))
    assert not any(
        isinstance(value, FakeTensor) for state in optimizer.state.values() for value in state.values()
    )
    model(x).sum().backward()
    optimizer.step()
    assert all(torch.isfinite(p).all() for p in model.parameters())
