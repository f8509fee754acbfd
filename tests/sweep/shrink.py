"""A default configuration made small by `rules`."""

from __future__ import annotations

import copy
import re
from typing import Any

from .rules import (
    CONSTRUCTED,
    HEAD_DIM,
    HEADS,
    HIDDEN,
    INDEX_LISTS,
    LAYERS,
    LEVELS,
    OVERRIDES,
    RULES,
    VOCABULARY,
    Rule,
)

_TOKEN = re.compile(
    r".*(_token_id|_token_index|_token_ids|_pad_id|_start_id|_end_id|_newline_id|_patch_id)s?|.*_id"
)


def small_config(model_type: str, level: int = 0, head: str = "") -> Any:
    """The default configuration of `model_type`, shrunk by the rules of `LEVELS[level]`, for one head."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config = CONFIG_MAPPING[model_type](**copy.deepcopy(CONSTRUCTED.get(model_type, {})))
    shrink(config, LEVELS[level])
    for name in (model_type, f"{model_type}/{head}"):
        for path, value in OVERRIDES.get(name, {}).items():
            _set_path(config, path, copy.deepcopy(value))
    if getattr(config, "is_encoder_decoder", False) and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = 1
    config.use_cache = False
    return config


def shrink(config: Any, groups: frozenset[str]) -> None:
    """Apply the rules to a configuration and those inside it, in place."""
    _shrink_one(config, groups)
    _vocabulary(config)
    if "vocabulary" in groups:
        _tokens_into_vocabulary(config, {})


def sub_configs(config: Any) -> list[tuple[str, Any]]:
    """Configurations directly inside one."""
    return [
        (name, value)
        for name, value in vars(config).items()
        if hasattr(value, "to_dict") and hasattr(value, "model_type")
    ]


def _shrink_one(config: Any, groups: frozenset[str]) -> None:
    for _, inner in sub_configs(config):
        _shrink_one(inner, groups)
    fields = {name: value for name, value in vars(config).items() if not name.startswith("_")}
    if vars(config).get("_out_features") or fields.get("out_features"):
        groups -= {"depth", "channels"}  # a backbone whose stages are named elsewhere
    layers_before = _layers(fields)
    heads_before = _heads(fields)
    for name, value in fields.items():
        rule = _rule(name, value)
        if rule is None or (rule.group not in groups and rule.group != "always"):
            continue
        changed = _changed(rule, value, heads_before)
        if changed != value:
            _set(config, name, changed)
    if "depth" in groups and layers_before:
        _cut_lists(config, layers_before)
    if "width" in groups:
        _derive(config, fields)
    if "image" in groups:
        _shrink_image(config)
    if "width" in groups:
        _shrink_rotary(config)


def _derive(config: Any, before: dict[str, Any]) -> None:
    """Widths that follow from others, and those that were equal and must stay so."""
    now = vars(config)
    rotary = now.get("qk_rope_head_dim")
    if isinstance(rotary, int) and before.get("head_dim") == before["qk_rope_head_dim"]:
        _set(config, "head_dim", rotary)
    hidden, heads = now.get("hidden_size"), now.get("num_attention_heads")
    if "head_dim" in now and now["head_dim"] is None and isinstance(hidden, int) and isinstance(heads, int):
        _set(config, "head_dim", hidden // heads)
    if "num_key_value_heads" in now and now["num_key_value_heads"] is None and isinstance(heads, int):
        _set(config, "num_key_value_heads", heads)


def _vocabulary(config: Any) -> None:
    """A vocabulary and, for heads that classify sequences, a padding token where there is none."""
    for _, inner in sub_configs(config):
        _vocabulary(inner)
    if vars(config).get("vocab_size", 0) is None:
        _set(config, "vocab_size", VOCABULARY)
    pad = vars(config).get("pad_token_id", 1)
    if pad is None or pad < 0:
        _set(config, "pad_token_id", 1)


def _rule(name: str, value: Any) -> Rule | None:
    if isinstance(value, bool) or not isinstance(value, (int, float, list, tuple)):
        return None
    for rule in RULES:
        if re.fullmatch(rule.pattern, name) and isinstance(value, (list, tuple)) == (
            rule.kind in ("each", "shrink", "ones")
        ):
            return None if rule.kind == "keep" else rule
    return None


def _changed(rule: Rule, value: Any, heads_before: int | None) -> Any:
    if rule.kind == "cap":
        return min(value, rule.value)
    if rule.kind == "set":
        return rule.value
    if rule.kind == "zero":
        return 0 if isinstance(value, int) else 0.0
    if rule.kind == "key_value":
        fewer = heads_before is not None and value < heads_before
        return min(value, HEADS // 2 if fewer else HEADS)
    if not all(isinstance(item, int) and not isinstance(item, bool) for item in value):
        return value
    if rule.kind == "each":
        made = [min(item, rule.value) for item in value]
    elif rule.kind == "ones":
        made = [min(item, 1) for item in value]
    else:
        made = [max(16, item // rule.value // 16 * 16) for item in value]
    return type(value)(made)


def _layers(fields: dict[str, Any]) -> int | None:
    for name in ("num_hidden_layers", "num_layers", "n_layer", "n_layers", "depth", "encoder_layers"):
        if isinstance(fields.get(name), int):
            return fields[name]
    return None


def _heads(fields: dict[str, Any]) -> int | None:
    for name in ("num_attention_heads", "num_heads", "n_heads", "n_head"):
        if isinstance(fields.get(name), int):
            return fields[name]
    return None


def _cut_lists(config: Any, before: int) -> None:
    """Lists with one entry per layer keep as many entries as there are layers, of different kinds."""
    after = _layers(vars(config)) or LAYERS
    if after >= before:
        return
    for name, value in list(vars(config).items()):
        if name.startswith("_") or not isinstance(value, (list, tuple)) or not value:
            continue
        if re.fullmatch(INDEX_LISTS, name) and all(isinstance(item, int) for item in value):
            inside = sorted({item if item < after else after - 1 for item in value})
            _set(config, name, type(value)(inside))
        elif len(value) in (before, before + 1) and not re.match(r"conv_|.*(kernel|stride|dilation)", name):
            _set(config, name, type(value)(_spread(list(value), after + len(value) - before)))
    for name, value in list(vars(config).items()):
        if isinstance(value, int) and not isinstance(value, bool) and re.fullmatch(INDEX_LISTS, name):
            if "token" not in name and value >= after:
                _set(config, name, after - 1)


def _spread(values: list[Any], count: int) -> list[Any]:
    """`count` of the values in their order, as many different ones as possible.

    >>> _spread(["a", "a", "b", "a"], 2)
    ['a', 'b']
    """
    seen: list[str] = []
    chosen: list[int] = []
    for index, value in enumerate(values):
        if str(value) not in seen and len(chosen) < count:
            seen.append(str(value))
            chosen.append(index)
    for index in range(len(values)):
        if len(chosen) < count and index not in chosen:
            chosen.append(index)
    return [values[index] for index in sorted(chosen)]


def _shrink_image(config: Any) -> None:
    """Images of four patches a side, or of 64 pixels."""
    side, patch = getattr(config, "image_size", None), getattr(config, "patch_size", None)
    if isinstance(side, int) and side > 64:
        wanted = patch * 4 if isinstance(patch, int) and patch > 4 else 64
        _set(config, "image_size", min(side, wanted))
    elif isinstance(side, (list, tuple)) and len(side) == 2 and all(isinstance(s, int) for s in side):
        patches = patch if isinstance(patch, (list, tuple)) else (patch, patch)
        wanted = [p * 4 if isinstance(p, int) and p > 4 else 64 for p in patches]
        _set(config, "image_size", type(side)(min(s, w) for s, w in zip(side, wanted)))


def _shrink_rotary(config: Any) -> None:
    """Sections of rotary dimensions add up to half of the smaller head."""
    for name in ("rope_parameters", "rope_scaling"):
        table = getattr(config, name, None)
        if not isinstance(table, dict):
            continue
        head = vars(config).get("head_dim") or HEAD_DIM
        if re.search(r"vl|glm4\w*v|glm_ocr|ernie", getattr(config, "model_type", "")) and "rope_theta" in table:
            table.setdefault("mrope_section", [16, 24, 24])  # what their code takes where nothing is said
        for part in [table, *(v for v in table.values() if isinstance(v, dict))]:
            half = int(head * (part.get("partial_rotary_factor") or 1)) // 2
            sections = part.get("mrope_section")
            if sections and sum(sections) > half:
                made = [max(1, item * half // sum(sections)) for item in sections]
                made[-1] += half - sum(made)
                part["mrope_section"] = made
            for factor in ("short_factor", "long_factor"):
                if isinstance(part.get(factor), list):
                    part[factor] = part[factor][:half]


def _tokens_into_vocabulary(config: Any, moved: dict[int, int]) -> None:
    """Special tokens beyond the smaller vocabulary go to its end; equal ones stay equal."""
    for _, inner in sub_configs(config):
        _tokens_into_vocabulary(inner, moved)
    for name, value in list(vars(config).items()):
        if not _TOKEN.fullmatch(name):
            continue
        if isinstance(value, int) and not isinstance(value, bool):
            _set(config, name, _moved(value, moved))
        elif isinstance(value, (list, tuple)) and value and all(isinstance(item, int) for item in value):
            _set(config, name, type(value)(_moved(item, moved) for item in value))


def _moved(token: int, moved: dict[int, int]) -> int:
    if token < VOCABULARY:
        return token
    return moved.setdefault(token, VOCABULARY - 1 - len(moved))


def _set(config: Any, name: str, value: Any) -> None:
    try:
        setattr(config, name, value)
    except Exception:
        config.__dict__[name] = value


def _set_path(config: Any, path: str, value: Any) -> None:
    *outer, name = path.split(".")
    for part in outer:
        config = getattr(config, part)
    _set(config, name, value)


__all__ = ["HIDDEN", "shrink", "small_config", "sub_configs"]
