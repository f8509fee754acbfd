"""Subjects from a Hugging Face folder or config.json. transformers is an optional extra, used late.

The weights are never read: the configuration alone says what the model is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from preflop.errors import BadFile, BadSubject
from preflop.subject import Subject, batch_sizes, needs_batch, read_json


def resolve_config(path: Path, batch: Any, common: dict[str, Any]) -> Subject:
    """The subject of a folder with a config.json, or of the file itself.

    Args:
        batch: data, a callable, or `{"batch_size": .., "sequence_length": ..}`.

    Raises:
        BadFile: no such file, or not JSON. BadSubject: a field is missing or impossible.
    """
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
    model_class = _model_class(transformers, config, file)

    def make_model() -> Any:
        return model_class._from_config(config)

    common["loss"] = common["loss"] or None
    make_batch, text, tokens = _batch(config, model_class, batch)
    assumptions = tuple(_beyond(config, batch_sizes(batch)))
    return Subject(
        name=str(path), make_model=make_model, make_batch=make_batch, batch_text=text, tokens=tokens,
        casts_parameters=True, assumptions=assumptions, **common,
    )


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


def _batch(config: Any, model_class: Any, batch: Any) -> tuple[Callable[[], Any], str, int | None]:
    if batch is None:
        raise needs_batch()
    sizes = batch_sizes(batch)
    if sizes is None:
        from preflop.subject import _batch_maker

        make, text = _batch_maker(batch)
        return make, text, None
    size, length = sizes
    text_config = config.get_text_config() if hasattr(config, "get_text_config") else config
    if "MultipleChoice" in model_class.__name__:
        raise BadSubject(
            f"{model_class.__name__} reads several choices a sample, which --batch and --seq do not "
            "describe.\n  Make its batch yourself: --batch-from FILE:function."
        )
    main = getattr(model_class, "main_input_name", "input_ids")
    if main == "pixel_values" and getattr(config, "image_size", None):
        return _images(config, model_class, size), f"{size} images", None
    if main != "input_ids" or not getattr(text_config, "vocab_size", None):
        raise BadSubject(
            f"{model_class.__name__} reads {main!r}, which --batch and --seq do not describe.\n"
            "  Make its batch yourself: --batch-from FILE:function."
        )
    if length is None:
        raise BadSubject(f"{model_class.__name__} reads tokens: give a sequence length (--seq N).")
    limit = _positions(text_config)
    if limit and not _rotary(text_config) and length > limit and config.model_type != "t5":
        raise BadSubject(
            f"the sequence has {length} tokens, the configuration allows {limit} positions.\n"
            f"  Give --seq of at most {limit}."
        )
    return (
        _tokens(text_config, model_class, size, length, config),
        f"{size} x {length} tokens",
        size * length,
    )


def _positions(config: Any) -> int | None:
    """Positions that the configuration names; None where it names none."""
    limit = getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None)
    return limit if isinstance(limit, int) and limit > 0 else None


def _rotary(config: Any) -> bool:
    """Whether positions are computed (RoPE) and not looked up in a table, which would end."""
    return any(getattr(config, name, None) is not None for name in ("rope_parameters", "rope_theta"))


def _beyond(config: Any, sizes: tuple[int, int | None] | None) -> Iterator[str]:
    """What to say of a sequence that runs, and is longer than the model was trained for."""
    text_config = config.get_text_config() if hasattr(config, "get_text_config") else config
    limit = _positions(text_config)
    if sizes and sizes[1] and limit and _rotary(text_config) and sizes[1] > limit:
        yield (
            f"{sizes[1]:,} tokens are more than the configuration's {limit:,} positions: rotary positions run "
            "at any length, beyond what the model was trained for"
        )


def _tokens(config: Any, model_class: Any, size: int, length: int, whole: Any) -> Callable[[], Any]:
    def make() -> dict[str, Any]:
        import torch

        ids = (torch.arange(size * length) % config.vocab_size).reshape(size, length)
        batch = {"input_ids": ids, **_labels(model_class.__name__, ids, whole)}
        if len(batch) == 1 and getattr(whole, "is_encoder_decoder", False):
            batch["decoder_input_ids"] = ids.clone()
        return batch

    return make


def _labels(head: str, ids: Any, config: Any) -> dict[str, Any]:
    """What makes a head return its own loss: one class per sequence or token, or the tokens themselves.

    Source: the signatures of transformers' heads (`ForTokenClassification.forward` and so on).
    """
    per_sequence = ids.new_zeros(ids.shape[0])
    if "QuestionAnswering" in head:
        return {"start_positions": per_sequence, "end_positions": per_sequence.clone()}
    if "SequenceClassification" in head or "NextSentencePrediction" in head:
        return {"labels": per_sequence}
    if "TokenClassification" in head:
        return {"labels": ids % max(int(getattr(config, "num_labels", 1)), 1)}
    if "ForPreTraining" in head and config.model_type in _NEXT_SENTENCE:
        return {"labels": ids.clone(), "next_sentence_label": per_sequence}
    if any(part in head for part in ("LM", "ConditionalGeneration", "PreTraining")):
        return {"labels": ids.clone()}
    return {}


# Their pre-training head also predicts whether one sentence follows another.
_NEXT_SENTENCE = ("bert", "mobilebert", "megatron-bert", "nezha")


def _images(config: Any, model_class: Any, size: int) -> Callable[[], Any]:
    def make() -> dict[str, Any]:
        import torch

        side = config.image_size
        height, width = side if isinstance(side, (list, tuple)) else (side, side)
        batch = {"pixel_values": torch.zeros(size, getattr(config, "num_channels", 3), height, width)}
        if "Classification" in model_class.__name__:
            batch["labels"] = torch.zeros(size, dtype=torch.int64)
        return batch

    return make


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
