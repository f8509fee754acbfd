"""The named axes in the models' signatures are contracts: here jaxtyping and beartype enforce them."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType

import pytest
import torch

from preflop.models.build import build, example_batch
from tests.models.small import SMALL, sequence_length

jaxtyping = pytest.importorskip("jaxtyping")
pytest.importorskip("beartype")

ROOM = "preflop.models"


def _forget_room() -> dict[str, ModuleType]:
    """Takes the room's torch modules out of sys.modules and returns them. The catalog stays: its classes
    are shared with what was imported before."""
    names = [name for name in sys.modules if name.startswith(ROOM + ".") and name != ROOM + ".catalog"]
    return {name: sys.modules.pop(name) for name in names}


@pytest.fixture(scope="module")
def checked() -> ModuleType:
    """A second copy of `preflop.models.build` whose every call is checked; the first stays in place."""
    unchecked = _forget_room()
    try:
        with jaxtyping.install_import_hook(ROOM, "beartype.beartype"):
            checked_build = importlib.import_module(ROOM + ".build")
    finally:
        _forget_room()
        sys.modules.update(unchecked)
        for name, module in unchecked.items():
            setattr(sys.modules[ROOM], name.removeprefix(ROOM + "."), module)
    return checked_build


@pytest.mark.parametrize("name", sorted(SMALL))
def test_every_call_of_every_module_keeps_its_named_axes(name: str, checked: ModuleType) -> None:
    """Forward of each family passes with every shape and dtype in its signatures checked."""
    facts = SMALL[name]
    model = checked.build(facts)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.01)
    output = model(**example_batch(facts, 2, sequence_length(facts)))
    assert output.loss.isfinite()


@pytest.mark.parametrize("name", sorted(SMALL))
def test_an_axis_in_the_wrong_place_is_refused(name: str, checked: ModuleType) -> None:
    """The checks above can fail: a batch that lost an axis does not get through."""
    facts = SMALL[name]
    model = checked.build(facts)
    batch = example_batch(facts, 2, sequence_length(facts))
    first = next(iter(batch))
    batch[first] = batch[first][0]
    with pytest.raises(jaxtyping.TypeCheckError):
        model(**batch)


def test_labels_of_another_length_are_refused(checked: ModuleType) -> None:
    """`sequence` is one number in a signature: labels one longer than the ids are an error."""
    facts = SMALL["gpt2"]
    model = checked.build(facts)
    batch = example_batch(facts, 2, 8)
    batch["labels"] = torch.cat((batch["labels"], batch["labels"][:, :1]), dim=1)
    with pytest.raises(jaxtyping.TypeCheckError):
        model(**batch)


def test_without_the_hook_nothing_is_checked(checked: ModuleType) -> None:
    """The copy that users import is not the checked one."""
    assert type(build(SMALL["gpt2"])) is not type(checked.build(SMALL["gpt2"]))
    assert sys.modules[ROOM + ".build"] is not checked
    forward = type(build(SMALL["gpt2"])).forward
    assert not hasattr(forward, "__wrapped__")
