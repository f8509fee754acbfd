"""Which pairs of configuration and head the sweep tries: transformers' auto mappings, by family."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

FAMILIES: dict[str, tuple[str, ...]] = {
    "causal language model": ("CAUSAL_LM",),
    "sequence to sequence": ("SEQ_TO_SEQ_CAUSAL_LM",),
    "masked language model": ("MASKED_LM",),
    "sequence classification": ("SEQUENCE_CLASSIFICATION",),
    "vision": ("IMAGE_CLASSIFICATION", "VIDEO_CLASSIFICATION", "MASKED_IMAGE_MODELING"),
    "audio and speech": (
        "AUDIO_CLASSIFICATION",
        "CTC",
        "SPEECH_SEQ_2_SEQ",
        "RNNT",
        "TDT",
        "AUDIO_XVECTOR",
        "AUDIO_FRAME_CLASSIFICATION",
        "TEXT_TO_SPECTROGRAM",
    ),
    "image and text": (
        "IMAGE_TEXT_TO_TEXT",
        "ZERO_SHOT_IMAGE_CLASSIFICATION",
        "VISUAL_QUESTION_ANSWERING",
    ),
    "time series": ("TIME_SERIES_PREDICTION", "TIME_SERIES_CLASSIFICATION", "TIME_SERIES_REGRESSION"),
    "detection": ("OBJECT_DETECTION", "ZERO_SHOT_OBJECT_DETECTION"),
    "segmentation and depth": (
        "SEMANTIC_SEGMENTATION",
        "INSTANCE_SEGMENTATION",
        "UNIVERSAL_SEGMENTATION",
        "IMAGE_SEGMENTATION",
        "DEPTH_ESTIMATION",
    ),
}
"""Family -> names of transformers' mappings (`MODEL_FOR_<name>_MAPPING_NAMES`)."""


@dataclass(frozen=True, slots=True)
class Pair:
    """One architecture with one head."""

    family: str
    mapping: str
    model_type: str
    head: str

    @property
    def name(self) -> str:
        """Unique in the sweep: "bert/BertForMaskedLM"."""
        return f"{self.model_type}/{self.head}"


def transformers_pairs() -> list[Pair]:
    """Every pair once, in the family that names it first."""
    from transformers.models.auto import modeling_auto

    found: dict[str, Pair] = {}
    for family, mappings in FAMILIES.items():
        for mapping in mappings:
            table: Any = getattr(modeling_auto, f"MODEL_FOR_{mapping}_MAPPING_NAMES", {})
            for model_type, heads in table.items():
                for head in heads if isinstance(heads, (list, tuple)) else (heads,):
                    pair = Pair(family, mapping, model_type, head)
                    found.setdefault(pair.name, pair)
    return list(found.values())
