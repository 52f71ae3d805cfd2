"""What the Hugging Face configurations of all families share, as Llama's has it; a family changes what differs."""

from __future__ import annotations

from pagefleet_engine.errors import ModelLoadError
from pagefleet_engine.layers.linear_kernel import Activation
from pagefleet_engine.layers.rotary_frequencies import RopeParameters
from pagefleet_engine.models.arch import ModelArch
from pagefleet_engine.models.config_fields import ConfigFields
from pagefleet_engine.models.quantization_config import read_quantization
from pagefleet_engine.models.rope_config import read_rope, stretched_context, unstretched_length

# Far over any model there is: a damaged number must not build layers until memory is full.
_MAX_LAYERS = 4096
_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
}


def read_shared(
    fields: ConfigFields, *, activation_field: str = "hidden_act", ropes: tuple[RopeParameters, ...] | None = None
) -> ModelArch:
    """A Llama of the configuration's sizes: no windows, no soft caps, one rotation.

    A family that rotates in several ways gives its `ropes`, for `max_position_embeddings` as the file has it.
    """
    hidden_size, num_heads, head_dim = (
        fields.count("hidden_size"),
        fields.count("num_attention_heads"),
        head_size(fields),
    )
    num_kv_heads = fields.count("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads or head_dim % 2:
        raise ModelLoadError(
            f"{fields.source}: {num_heads} heads of size {head_dim} over {num_kv_heads} key/value heads cannot be: the "
            "size must be even, and the first number a multiple of the last; repair the file"
        )
    num_layers = fields.count("num_hidden_layers", high=_MAX_LAYERS)
    context_length = fields.count("max_position_embeddings")
    if ropes is None:
        ropes = (read_rope(fields, head_dim),)
        context_length = stretched_context(ropes[0], context_length)
    return ModelArch(
        model_type=fields.text("model_type", ""),
        vocab_size=fields.count("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=fields.count("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        activation=_activation(fields, activation_field),
        query_scale=head_dim**-0.5,
        ropes=ropes,
        layer_ropes=(0,) * num_layers,
        windows=(None,) * num_layers,
        tie_word_embeddings=fields.flag("tie_word_embeddings", False),
        attention_bias=fields.flag("attention_bias", False),
        mlp_bias=fields.flag("mlp_bias", False),
        context_length=context_length,
        default_length=min(unstretched_length(rope, context_length) for rope in ropes),
        eos_token_ids=fields.token_ids("eos_token_id"),
        dtype=fields.text("dtype", fields.text("torch_dtype", "float32")).removeprefix("torch."),
        quantization=read_quantization(fields),
    )


def head_size(fields: ConfigFields) -> int:
    """As given, or the hidden size split evenly."""
    return fields.count("head_dim", fields.count("hidden_size") // fields.count("num_attention_heads"))


def uniform_windows(fields: ConfigFields, num_layers: int) -> tuple[int | None, ...]:
    """`sliding_window` for every layer; none when it is null."""
    window = fields.count("sliding_window") if fields.present("sliding_window") else None
    return (window,) * num_layers


def named_windows(fields: ConfigFields, kinds: list[str]) -> tuple[int | None, ...]:
    """`sliding_window` for the layers whose kind is `sliding_attention`."""
    window = fields.count("sliding_window") if "sliding_attention" in kinds else None
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _activation(fields: ConfigFields, name: str) -> Activation:
    said = fields.text(name, "silu")
    if said not in _ACTIVATIONS:
        raise ModelLoadError(f"{fields.source}: {name} is {said}; pagefleet runs {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[said]
