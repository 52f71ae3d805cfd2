"""Where in a pipeline the tensors of a model are whose stages need memory unevenly: Gemma 3n's text."""

from __future__ import annotations

import re
from collections.abc import Mapping

from pagefleet_protocol.model_config.shape import UNEVEN_STAGES, ModelShape
from pagefleet_protocol.model_facts import StageFacts

_OF_TEXT = re.compile(
    r"(?:model\.language_model\.|language_model\.model\.|language_model\.(?=lm_head)|model\.|(?=lm_head))"
)
_LAYER = re.compile(r"layers\.(\d+)\.")
_FIRST = re.compile(
    r"(?:embed_tokens|embed_tokens_per_layer|per_layer_(?:model_projection|projection_norm)|altup_projections)\."
)
_LAST = re.compile(r"(?:lm_head|norm|altup_unembed_projections)\.")
_MAX_LAYERS = 128
"""So that a download's result has room for them."""
_KEPT_BY = re.compile(r"self_attn\.[kv]_(?:proj|norm)\.")


def stage_facts(shape: ModelShape, tensors: Mapping[str, int]) -> StageFacts | None:
    """Return the bytes of each place, of tensors and their bytes; None: stages are even, or layers are too many."""
    if shape.model_type not in UNEVEN_STAGES or shape.num_layers > _MAX_LAYERS:
        return None
    keeping, tied = len(shape.kept_windows), shape.fields.flag("tie_word_embeddings", False)
    first = last = both = 0
    layers = [0] * shape.num_layers
    for name, size in tensors.items():
        text = _OF_TEXT.match(name)
        part = name[text.end() :] if text else ""
        if (found := _LAYER.match(part)) and int(found[1]) < len(layers):
            # Published checkpoints have matrices there that nothing reads.
            unused = int(found[1]) >= keeping and _KEPT_BY.match(part, found.end())
            layers[int(found[1])] += 0 if unused else size
        elif tied and part.startswith("embed_tokens."):
            both += size
        elif _FIRST.match(part):
            first += size
        elif _LAST.match(part) and not (tied and part.startswith("lm_head.")):
            last += size
    windows = tuple(window or 0 for window in shape.windows)
    return StageFacts(first, last, both, tuple(layers), windows)
