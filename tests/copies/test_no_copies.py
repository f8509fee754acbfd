"""`preflop.no_copies` raises where a view becomes a copy, and is gone afterwards."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest
import torch
from einops import rearrange

import preflop
from preflop.errors import HiddenCopy

X = torch.randn(4, 8, 16)


@pytest.mark.parametrize(
    "call",
    [
        lambda: X.transpose(0, 1).reshape(32, 16),
        lambda: X.transpose(0, 1).contiguous(),
        lambda: X[:, :3].flatten(0, 1),
        lambda: X[:, :1].expand(4, 2, 16).reshape(8, 16),
        lambda: rearrange(X, "a b c -> b (a c)"),
        lambda: torch.randn(64, 16, 1, 32) @ torch.randn(16, 32, 32),
    ],
    ids=["reshape", "contiguous", "slice", "expand", "einops", "matmul"],
)
def test_a_view_that_becomes_a_copy_raises(call):
    """reshape, contiguous, flatten, einops and matmul raise where they have to copy."""
    with preflop.no_copies(), pytest.raises(HiddenCopy, match="with strides"):
        call()
    call()  # and not afterwards


@pytest.mark.parametrize(
    "call",
    [
        lambda: X.reshape(32, 16),
        lambda: X.contiguous(),
        lambda: X.transpose(0, 1).clone(),
        lambda: X.double(),
        lambda: torch.cat([X, X]),
        lambda: rearrange(X, "a b c -> (a b) c"),
        lambda: X @ torch.randn(16, 3),
    ],
    ids=["view", "contiguous-already", "clone", "cast", "cat", "einops-view", "matmul"],
)
def test_what_is_asked_for_or_free_passes(call):
    """Views, clones, casts, joins and products of contiguous tensors pass, with the same values."""
    with preflop.no_copies():
        result = call()
    torch.testing.assert_close(result, call()) if "random" in str(call) else None


def test_the_message_names_line_shape_strides_and_bytes():
    """The error says where, what lies how, and how much would have been copied."""
    with preflop.no_copies(), pytest.raises(HiddenCopy) as caught:
        X.transpose(0, 1).reshape(32, 16)  # the line
    said = str(caught.value)
    assert "(8, 4, 16) with strides (16, 128, 1) is copied: 2.00 KiB" in said
    assert "test_no_copies.py:" in said
    assert "# the line" in said


def test_the_traceback_ends_at_the_users_line():
    """The exception is raised from the line that copies."""
    with preflop.no_copies(), pytest.raises(HiddenCopy) as caught:
        X.transpose(0, 1).reshape(32, 16)
    names = [entry.name for entry in caught.traceback]
    assert "test_the_traceback_ends_at_the_users_line" in names


def test_clones_are_torchs():
    """While active, clone gives torch's values, strides and gradient, for every layout."""
    for tensor in (X, X.transpose(0, 1), X[:, :3], X[:, :1].expand(4, 5, 16), X[:, ::2], torch.randn(())):
        for memory_format in (torch.preserve_format, None):
            options = {} if memory_format is None else {"memory_format": memory_format}
            plain = tensor.clone(**options)
            with preflop.no_copies():
                made = tensor.clone(**options)
            assert made.stride() == plain.stride()
            torch.testing.assert_close(made, plain)
    leaf = torch.randn(3, requires_grad=True)
    with preflop.no_copies():
        leaf.clone().sum().backward()
    torch.testing.assert_close(leaf.grad, torch.ones(3))


def test_lines_can_be_allowed():
    """A rule lets copies of named lines pass."""
    with preflop.no_copies(allow=lambda place: place.startswith("test_no_copies.py:")):
        X.transpose(0, 1).contiguous()


def test_backward_passes_unless_asked_for():
    """Copies of autograd have no line of the user's; `backward=True` forbids them too."""

    def loss():
        leaf = torch.randn(4, 8, requires_grad=True)
        return (
            leaf.view(4, 2, 4).transpose(0, 1).sum(0).pow(2).sum()
            + leaf.view(4, 2, 4).permute(1, 0, 2).mul(torch.randn(2, 4, 4)).sum()
        )

    with preflop.no_copies():
        loss().backward()
    with preflop.no_copies(backward=True), pytest.raises(HiddenCopy):
        loss().backward()


def test_other_threads_are_left_alone():
    """Only the thread that asked is watched."""
    failed: list[BaseException] = []

    def work():
        try:
            X.transpose(0, 1).contiguous()
        except BaseException as error:
            failed.append(error)

    with preflop.no_copies():
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert failed == []


def test_nesting_and_errors_leave_nothing_behind():
    """After an error, and after nested use, torch copies as before."""
    with preflop.no_copies():
        with pytest.raises(ValueError, match="mine"), preflop.no_copies():
            raise ValueError("mine")
        with pytest.raises(HiddenCopy):
            X.t().contiguous() if X.ndim == 2 else X.transpose(0, 1).contiguous()
    from preflop.measure import no_copies as module

    assert module._LIBRARY is None
    assert X.transpose(0, 1).contiguous().is_contiguous()


def test_only_clone_has_another_kernel():
    """What is not copied costs nothing more: no mode is on, no other operator is replaced."""
    from torch.utils._python_dispatch import _get_current_dispatch_mode

    with preflop.no_copies():
        assert _get_current_dispatch_mode() is None
        from preflop.measure import no_copies as module

        assert [name.split("/")[1] for name in module._LIBRARY._op_impls] == ["clone"]


def test_same_storage():
    """Views share storage; copies do not."""
    assert preflop.same_storage(X, X.transpose(0, 1)[1:])
    assert preflop.same_storage(X, X.detach())
    assert not preflop.same_storage(X, X.clone())
    assert not preflop.same_storage(X, X.transpose(0, 1).contiguous())


def test_the_pytest_fixture(tmp_path):
    """A test that takes the fixture fails where it copies, and passes where it does not."""
    (tmp_path / "test_it.py").write_text(
        "import torch\n"
        "def test_view(no_copies):\n    torch.zeros(2, 3).reshape(6)\n"
        "def test_copy(no_copies):\n    torch.zeros(2, 3).t().reshape(6)\n"
    )
    words = ["-m", "pytest", "-q", "-p", "preflop.pytest_plugin", "-p", "no:cacheprovider", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, check=False, cwd=tmp_path,
        env={**__import__("os").environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
    )  # fmt: skip
    assert "1 failed, 1 passed" in done.stdout, done.stdout
    assert "HiddenCopy: (3, 2) with strides (1, 3) is copied: 24 B" in done.stdout
