"""Subjects from a Hugging Face folder or config.json. transformers is an optional extra, used late.

The weights are never read: the configuration alone says what the model is.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from preflop.axes import SEQ, Axis
from preflop.errors import BadFile, BadSubject
from preflop.huggingface_batch import axes_of_class, batch_of, positions, rotary
from preflop.subject import Subject, as_path, batch_sizes, needs_batch, of_batch, read_json


def resolve_config(path: Path, batch: Any, common: dict[str, Any]) -> Subject:
    """The subject of a folder with a config.json, or of the file itself.

    Args:
        batch: data, a callable, or sizes: `{"batch_size": .., "sequence_length": ..}`, of an encoder with a
            decoder `{"batch_size": .., "source_length": .., "target_length": ..}`, of sound `{..., "frames": ..}`.

    Raises:
        BadFile: no such file, or not JSON. BadSubject: a field is missing or impossible.
    """
    config, model_class = _class_of(path)

    def make_model() -> Any:
        return model_class._from_config(config)

    common["loss"] = common["loss"] or None
    if batch is None:
        raise needs_batch()
    sizes, name = batch_sizes(batch), as_path(str(path))
    if sizes is None:
        return Subject(name=name, make_model=make_model, casts_parameters=True, **of_batch(batch), **common)
    made = batch_of(config, model_class, sizes)
    return Subject(
        name=name, make_model=make_model, make_batch=made.make, batch_text=made.text, tokens=made.tokens,
        sizes=made.sizes, regimes=(made.axes,), casts_parameters=True,
        assumptions=tuple(_beyond(config, sizes.lengths.get(SEQ))), **common,
    )  # fmt: skip


def config_axes(path: Path) -> tuple[Axis, ...]:
    """The axes that a configured model's batch can be resized along.

    Raises:
        BadFile: no such file, or not JSON. BadSubject: it is not a configuration, or sizes do not describe its
            batch.
    """
    return axes_of_class(*_class_of(path))


def _class_of(path: Path) -> tuple[Any, Any]:
    """The configuration in a folder or file, and the class that it configures."""
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise BadFile(f"no {str(file)!r}.\n  Give a folder with a config.json, or the file itself.")
    fields = read_json(file)
    if not isinstance(fields, dict) or "model_type" not in fields:
        raise BadSubject(
            f"{file} has no \"model_type\", so it does not say which architecture it configures.\n"
            "  A Hugging Face config.json has one, for example \"model_type\": \"gpt2\"."
        )
    transformers = _transformers()
    config = _config(transformers, fields, file)
    return config, _model_class(transformers, config, file)


def _transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise BadSubject(
            "reading a Hugging Face configuration needs transformers.\n"
            "  Install it: pip install 'preflop[huggingface]'."
        ) from error
    return transformers


def _config(transformers: Any, fields: dict[str, Any], file: Path) -> Any:
    kinds = transformers.models.auto.configuration_auto.CONFIG_MAPPING
    kind = fields["model_type"]
    if kind not in kinds:
        from preflop.errors import nearest

        near = ", ".join(nearest(str(kind), list(kinds.keys())))
        raise BadSubject(
            f"{file}: transformers {transformers.__version__} knows no model_type {kind!r}."
            + (f"\n  Nearest: {near}." if near else "")
        )
    for name, value in fields.items():
        _check_size(name, value, file)
    try:
        return kinds[kind].from_dict(fields)
    except Exception as error:
        raise BadSubject(f"{file} is not a configuration of {kind}: {_first_line(error)}") from error


_SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "n_embd", "n_layer",
          "n_head", "intermediate_size", "d_model", "num_layers", "num_heads", "d_ff",
          "num_key_value_heads", "max_position_embeddings", "image_size", "patch_size")


def _check_size(name: str, value: Any, file: Path) -> None:
    if name not in _SIZES or value is None or isinstance(value, (list, dict)):
        return
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        raise BadSubject(f"{file}: {name} is {value!r}; it must be a whole number of at least 1.")


def _model_class(transformers: Any, config: Any, file: Path) -> Any:
    names = list(getattr(config, "architectures", None) or [])
    for name in names:
        found = getattr(transformers, name, None)
        if found is not None:
            return found
    if names:
        from preflop.errors import nearest

        near = nearest(names[0], [n for n in dir(transformers) if n.startswith(names[0][:2])])
        raise BadSubject(
            f"{file}: transformers {transformers.__version__} has no class {', '.join(names)} "
            "(\"architectures\")."
            + (f"\n  Nearest: {', '.join(near)}." if near else "")
            + "\n  Where its code is your own, give a factory: path/file.py:function."
        )
    auto = transformers.models.auto.modeling_auto
    for mapping in (auto.MODEL_FOR_CAUSAL_LM_MAPPING, auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
                    auto.MODEL_FOR_MASKED_LM_MAPPING, auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING):
        if type(config) in mapping:
            found = mapping[type(config)]
            return found[0] if isinstance(found, (list, tuple)) else found
    raise BadSubject(
        f"{file}: transformers has no model for architectures={names or None} "
        f"of model_type {config.model_type!r}.\n"
        "  Name one in \"architectures\", or give a factory: path/file.py:function."
    )


def _beyond(config: Any, length: int | None) -> Iterator[str]:
    """What to say of a sequence that runs, and is longer than the model was trained for."""
    text_config = config.get_text_config() if hasattr(config, "get_text_config") else config
    limit = positions(text_config)
    if length and limit and rotary(text_config) and length > limit:
        yield (
            f"{length:,} tokens are more than the configuration's {limit:,} positions: rotary positions run "
            "at any length, beyond what the model was trained for"
        )


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
