"""How many numbers a model's matrices have: all of them, and those that one token is multiplied by."""

from __future__ import annotations

from dataclasses import dataclass

from pagefleet_engine.models.arch import AltUpArch, ModelArch


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterCount:
    """Of matrices; norms and biases are too few to count."""

    layers: int
    """Of attention, MLPs, routers and shared experts: what every token goes through."""
    experts: int
    """Of all experts that tokens choose from."""
    used_experts: int
    """Of those that one token chooses."""
    embedding: int
    """Of the vocabulary's table."""
    head: int
    """The same of the head; 0: it is the embedding's table."""
    around: int = 0
    """Of a table of positions, and of projections between the embedding's width and the layers'."""
    looked_up: int = 0
    """Of a second table by tokens, of which one uses a row alone."""

    @property
    def total(self) -> int:
        """All of them."""
        return self.layers + self.experts + self.embedding + self.head + self.around + self.looked_up

    @property
    def active(self) -> int:
        """As models publish it: what one token uses, and tables whole but one that stays behind (`looked_up`)."""
        return self.total - self.looked_up - self.experts + self.used_experts

    def describe(self) -> str:
        """For the log."""
        active = "" if self.active == self.total else f", {self.active / 1e9:.3g} B active"
        return f"{self.total / 1e9:.3g} B parameters{active}"


def count_parameters(arch: ModelArch) -> ParameterCount:
    """Of a model of this shape, or of a rank's part of it."""
    hidden, width = arch.hidden_size, arch.embedding_size or arch.hidden_size
    table, mlp = arch.vocab_size * width, 3 if arch.mlp_gate else 2
    layers = arch.num_layers * _attention(arch) - arch.num_kv_shared_layers * hidden * arch.kv.numbers
    experts, dense, one, used = arch.experts, arch.num_layers, 0, 0
    if experts is not None:
        sparse = sum(experts.layers)
        dense -= sparse
        layers += sparse * hidden * (experts.routing.num_experts + 3 * experts.shared_intermediate_size)
        one = sparse * 3 * hidden * experts.intermediate_size
        used = experts.routing.top_k
    altup, looked_up = arch.altup, 0
    if altup is not None:
        layers += _beside(arch, altup)
        looked_up = altup.per_layer_vocab_size * arch.num_layers * altup.per_layer_size
    return ParameterCount(
        layers=layers + dense * mlp * hidden * arch.intermediate_size,
        experts=0 if experts is None else one * experts.routing.num_experts,
        used_experts=one * used,
        embedding=table,
        head=0 if arch.tie_word_embeddings else table,
        around=hidden * (arch.position_rows + 2 * (arch.embedding_size or 0)),
        looked_up=looked_up,
    )


def _beside(arch: ModelArch, altup: AltUpArch) -> int:
    """Of what stands beside attention and MLPs: versions of the stream, low-rank maps, each layer's own input."""
    num, size = altup.num_inputs, altup.per_layer_size
    of_layer = arch.hidden_size * (num + 2 * altup.laurel_rank + 3 * size) + num**3 + num**2
    return arch.num_layers * of_layer + 2 * (num - 1) * arch.hidden_size**2


def _attention(arch: ModelArch) -> int:
    """Of one layer."""
    hidden, query, output = arch.hidden_size, arch.num_heads * arch.head_dim, arch.num_heads * arch.value_dim
    latent = arch.latent
    if latent is None:
        return hidden * (query + arch.kv.numbers + output)
    queries = hidden * query if latent.query_rank is None else latent.query_rank * (hidden + query)
    made = latent.rank * arch.num_heads * (latent.nope_dim + latent.value_dim)
    return queries + hidden * arch.kv.numbers + made + hidden * output
