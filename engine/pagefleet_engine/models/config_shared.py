"""What the Hugging Face configurations of all families share, as Llama's has it; a family changes what differs."""

from __future__ import annotations

from pagefleet_protocol.model_config.fields import ConfigFields
from pagefleet_protocol.model_config.shape import ModelShape

from pagefleet_engine.errors import ModelLoadError
from pagefleet_engine.layers.linear_kernel import Activation
from pagefleet_engine.layers.rotary_frequencies import RopeParameters
from pagefleet_engine.models.arch import ModelArch
from pagefleet_engine.models.quantization_config import read_quantization
from pagefleet_engine.models.rope_config import read_rope

_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
}


def read_shared(
    shape: ModelShape, *, activation_field: str = "hidden_act", ropes: tuple[RopeParameters, ...] | None = None
) -> ModelArch:
    """A Llama of this shape: no soft caps, one rotation.

    A family that rotates in several ways gives its `ropes`, for `max_position_embeddings` as the file has it.
    """
    fields = shape.fields
    return ModelArch(
        model_type=shape.model_type,
        vocab_size=fields.count("vocab_size"),
        hidden_size=shape.hidden_size,
        intermediate_size=fields.count("intermediate_size"),
        num_layers=shape.num_layers,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        activation=_activation(fields, activation_field),
        query_scale=shape.head_dim**-0.5,
        ropes=ropes or (read_rope(fields, shape.head_dim),),
        layer_ropes=(0,) * shape.num_layers,
        windows=shape.windows,
        tie_word_embeddings=fields.flag("tie_word_embeddings", False),
        attention_bias=fields.flag("attention_bias", False),
        mlp_bias=fields.flag("mlp_bias", False),
        context_length=shape.context_length,
        default_length=shape.default_length,
        eos_token_ids=fields.token_ids("eos_token_id"),
        dtype=shape.dtype,
        quantization=read_quantization(fields),
    )


def _activation(fields: ConfigFields, name: str) -> Activation:
    said = fields.text(name, "silu")
    if said not in _ACTIVATIONS:
        raise ModelLoadError(f"{fields.source}: {name} is {said}; pagefleet runs {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[said]
