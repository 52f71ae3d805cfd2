"""HQQ's section of config.json (`quant_method` hqq): one way for all linear layers, or several by names within a block.

Source: transformers' `HqqConfig` and what it makes of it (`integrations/hqq.py`).
"""

from __future__ import annotations

import re

from pagefleet_protocol.model_config.fields import ConfigFields
from pagefleet_protocol.model_config.quantized import hqq_parameters

from pagefleet_engine.layers.quantization_scheme import PackedScheme, Quantization, Rule, Scheme
from pagefleet_engine.models.packed_config import EVERY_LAYER, HEAD, anywhere
from pagefleet_engine.models.quantization_fields import own_name


def read_hqq(section: ConfigFields) -> Quantization:
    """`quant_method` hqq. A layer that none of several ways names stays in a float type.

    Raises:
        ModelConfigError: it is not run.
    """
    left = (HEAD, *(anywhere(own_name(name)) for name in section.texts("skip_modules")))
    rules = [
        Rule((rf"re:.*\.{re.escape(tag)}$",) if tag else EVERY_LAYER, _scheme(weights))
        for tag, weights in hqq_parameters(section).items()
    ]
    return Quantization(rules=tuple(rules), ignored=left, leaves_stacks=True)


def _scheme(weights: ConfigFields) -> Scheme:
    size = weights.count("group_size") if weights.present("group_size") else None
    bits = 8 if weights.number("nbits") > 4 else 4
    return PackedScheme(packing="hqq", bits=bits, group_size=size, zero_points=True)
