"""Bytes per parameter by recipe, and what a half-precision step keeps in fp32."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

import preflop
from preflop.cli.main import run
from preflop.errors import PreflopError
from preflop.formulas.recipes import RECIPES, find_recipe
from preflop.plan.precision import precision_advice


def test_m25_bytes_per_parameter():
    """16, 16, 18, 20 at the peak, 8, 18 at the peak: each public claim is one recipe's."""
    bytes_of = {recipe.name: (recipe.bytes, recipe.peak_bytes) for recipe in RECIPES}
    assert bytes_of == {
        "fp32": (16, 16),
        "autocast": (16, 18),
        "bf16": (8, 8),
        "bf16-fp32-states": (12, 12),
        "bf16-master": (16, 16),
        "bf16-master-fp32-gradients": (18, 18),
        "bf16-master-cast": (16, 20),
    }


@pytest.mark.parametrize("recipe", [r for r in RECIPES if r.precision], ids=lambda r: r.name)
def test_recipes_are_what_a_recorded_step_keeps(recipe):
    """Weights, gradients and states of the account, per parameter, are the recipe's (step counters apart)."""
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False))
    columns = preflop.account(model, torch.randn(2, 64), precision=recipe.precision).memory.columns
    count = columns.parameters.elements
    assert columns.parameters.bytes == recipe.weight * count
    assert columns.gradients.bytes == recipe.gradient * count
    counters = 2 * 4
    assert columns.optimizer_states.bytes - counters == (recipe.master + recipe.states) * count


def test_autocast_keeps_norms_and_losses_in_fp32():
    """Under autocast the norm runs in fp32: half of what it moves is more than bf16 would; matmuls do not."""
    model = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 64))
    account = preflop.account(model, torch.randn(8, 64), precision="bf16-mixed", device="h100-sxm")
    advice = precision_advice(account)
    norm = next(row for row in advice.kept if row.op == "aten.native_layer_norm")
    assert norm.extra_bytes == norm.moved_bytes // 2
    assert norm.extra_s == pytest.approx(norm.extra_bytes / 3.35e12, rel=0.01)
    assert not any(row.matmul for row in advice.kept)
    assert not any(row.phase == "optimizer" for row in advice.kept)
    assert advice.cast_calls > 0
    assert advice.extra_bytes == sum(row.extra_bytes for row in advice.kept)


def test_a_full_fp32_step_keeps_nothing_apart():
    """Without half precision there is nothing to keep in fp32 and nothing to cast."""
    advice = precision_advice(preflop.account(nn.Linear(8, 8, bias=False), torch.randn(2, 8)))
    assert advice.kept == ()
    assert next(cost.total_bytes for cost in advice.recipes) == 16 * 64


def test_unknown_recipe_names_the_nearest():
    """No recipe is guessed."""
    with pytest.raises(PreflopError, match="Nearest: bf16-master"):
        find_recipe("bf16-mastr")


def test_the_command(capsys):
    """Without a model: the recipes, without torch. With one: what is kept in fp32."""
    assert run(["precision", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {r["name"]: r["bytes_per_parameter"] for r in found["recipes"]}["bf16-master-fp32-gradients"] == 18
    words = ["precision", "gpt2", "--batch", "1", "--seq", "64", "--precision", "bf16-mixed", "--json"]
    assert run(words) == 0
    found = json.loads(capsys.readouterr().out)
    assert {row["op"] for row in found["kept_in_fp32"]} >= {"aten.native_layer_norm", "aten._log_softmax"}
