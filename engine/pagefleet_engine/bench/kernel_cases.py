"""What `pagefleet bench kernels` runs: each kernel at the sizes of serving, beside torch's own way to the same result.

A case makes its inputs when it is run and counts the fewest bytes and operations that any implementation needs. Pages
lie as in serving, in a pool of many layers, and each call reads another layer.
Shapes: T tokens, S sequences, N query heads, K key heads, H head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, count, cycle

import numpy as np
import torch
import torch.nn.functional as F
from pagefleet_kernels.activation import gated_activation
from pagefleet_kernels.attention import paged_attention, varlen_attention
from pagefleet_kernels.attention_tuning import AttentionWorkload, RandomPages
from pagefleet_kernels.cascade_attention import cascade_attention
from pagefleet_kernels.decode_attention import decode_attention
from pagefleet_kernels.expert_blocks import align_experts
from pagefleet_kernels.experts import ExpertWeights, combine_experts, grouped_matmul
from pagefleet_kernels.few_rows_matmul import few_rows_matmul
from pagefleet_kernels.heads import prepare_heads
from pagefleet_kernels.layout import Order
from pagefleet_kernels.norm import rms_norm
from pagefleet_kernels.packed_matmul import packed_matmul
from pagefleet_kernels.quantize import quantize_fp8
from pagefleet_kernels.scaled_matmul import scaled_matmul
from pagefleet_kernels.score_rule import ScoreRule
from pagefleet_protocol.sampling_params import SamplingParams
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from pagefleet_engine.attention.backend import AttentionSpec, BatchGeometry
from pagefleet_engine.attention.flash_backend import flash_attention, newest_flash, why_no_flash
from pagefleet_engine.bench.kernel_tuning import random_packed
from pagefleet_engine.core.step import NewRow
from pagefleet_engine.worker.sampler import Sampler, SampleRows

BLOCK_SIZE = 16
FLASH_BESIDE = "attention beside flash"
_MORE_THAN_A_CACHE = 256 * 2**20
_ROOM_ON_A_CPU = 4 * 2**20
_FLASH_FIRST = [SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
Run = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Prepared:
    """Inputs are in place."""

    ours: Run
    peer: Run | None
    """Torch's own; None where it has none."""
    num_bytes: float
    """Read or written at least."""
    flops: float


@dataclass(frozen=True, slots=True)
class KernelCase:
    """One kernel at one size."""

    family: str
    size: str
    prepare: Callable[[torch.device], Prepared]


@dataclass(frozen=True, slots=True)
class Heads:
    """Of one attention layer."""

    num_heads: int
    num_kv_heads: int
    head_dim: int


LLAMA_HEADS = Heads(32, 8, 128)


@dataclass(frozen=True, slots=True)
class ExpertSizes:
    """Of one layer; experts are as wide as the hidden state, as in gpt-oss."""

    num_experts: int
    top_k: int
    width: int


def all_cases(*, small: bool) -> Iterator[KernelCase]:
    """Every kernel over its sizes; `small` for machines without a GPU, to see that all run."""
    yield from _attention_cases(small)
    for tokens in (4,) if small else (1, 256, 8192):
        yield KernelCase("rms norm", f"{tokens} x 4096", partial(_norm, tokens))
        yield KernelCase("heads: norm, rotate, write", f"{tokens}", partial(_heads, tokens))
        yield KernelCase("silu and mul", f"{tokens} x 14336", partial(_activation, tokens))
    vocab_size = 2000 if small else 151936
    for batch in (2,) if small else (1, 64, 256):
        for name, sampling in (
            ("greedy", SamplingParams(temperature=0.0)),
            ("plain", SamplingParams(seed=1)),
            ("top-k, top-p", SamplingParams(seed=1, top_k=50, top_p=0.95)),
        ):
            size = f"{batch} x {vocab_size}"
            yield KernelCase(f"sampling: {name}", size, partial(_sampling, batch, vocab_size, sampling))
    inputs, outputs = (64, 96) if small else (4096, 14336)
    for rows in (2,) if small else (1, 8, 16):
        case = partial(_few_rows, rows, inputs, outputs)
        yield KernelCase("product of few rows", f"{rows} x {inputs} x {outputs}", case)
    for rows in (2,) if small else (1, 16, 256, 4096):
        size = f"{rows} x {inputs} x {outputs}"
        yield KernelCase("fp8 product", size, partial(_product, rows, inputs, outputs))
        yield KernelCase("int4 product", size, partial(_packed, rows, inputs, outputs))
    of = ExpertSizes(4, 2, 64) if small else ExpertSizes(32, 4, 2880)
    for rows in (2,) if small else (1, 8, 64, 512, 4096):
        for family, in_four_bits in (("experts", False), ("experts in mxfp4", True)):
            size = f"{rows} x {of.width}, {of.top_k} of {of.num_experts}"
            yield KernelCase(family, size, partial(_experts, rows, of, in_four_bits))
    for batch, context in ((1, 4096), (64, 4096), (256, 2048)) * (not small):
        yield KernelCase(f"{FLASH_BESIDE}: decode", f"{batch} x {context}", partial(flash_case, [1] * batch, context))
    for length in (2048, 16384) * (not small):
        yield KernelCase(f"{FLASH_BESIDE}: prefill", f"{length}", partial(flash_case, [length], length))


def _attention_cases(small: bool) -> Iterator[KernelCase]:
    batches, contexts = ((2,), (64,)) if small else ((1, 16, 64, 256), (1024, 4096, 16384))
    for batch in batches:
        for context in contexts:
            if batch * context <= 2**20:
                yield KernelCase("decode attention", f"{batch} x {context}", partial(decode_case, batch, context))
    for batch, context in ((2, 64),) if small else ((16, 4096), (64, 4096)):
        case = partial(decode_case, batch, context, order="layers")
        yield KernelCase("decode attention, pool by layer", f"{batch} x {context}", case)
    for length in (64,) if small else (512, 2048, 8192, 16384):
        yield KernelCase("prefill attention", f"{length}", partial(prefill_case, length))
    for batch, shared, own in ((2, 32, 16),) if small else ((64, 8192, 512),):
        yield KernelCase("cascade attention", f"{batch} x ({shared} + {own})", partial(_cascade, batch, shared, own))


def decode_case(
    batch: int, context: int, device: torch.device, *, heads: Heads = LLAMA_HEADS, order: Order = "blocks"
) -> Prepared:
    """One query for each of `batch` sequences; torch's way has keys and values dense, each sequence's own."""
    pages = _Pages(batch, context, heads, device, order)
    q_SNH = torch.randn(batch, heads.num_heads, heads.head_dim, device=device).bfloat16()
    scale = heads.head_dim**-0.5
    num_bytes = 2 * batch * context * heads.num_kv_heads * heads.head_dim * 2.0
    flops = 4.0 * batch * context * heads.num_heads * heads.head_dim
    dense = cycle(pages.dense())

    def ours() -> Tensor:
        return decode_attention(q_SNH, pages.next_layer(), pages.tables_SB, pages.seq_lens_S, ScoreRule(scale=scale))

    def peer() -> Tensor:
        k, v = next(dense)
        return F.scaled_dot_product_attention(q_SNH.unsqueeze(2), k, v, scale=scale, enable_gqa=True)

    return Prepared(ours, peer, num_bytes, flops)


def prefill_case(length: int, device: torch.device, *, heads: Heads = LLAMA_HEADS) -> Prepared:
    """One whole prompt; the peer is torch's flash attention over dense tensors."""
    pages = _Pages(1, length, heads, device)
    q_TNH = torch.randn(length, heads.num_heads, heads.head_dim, device=device).bfloat16()
    starts = torch.tensor([0, length], dtype=torch.int32, device=device)
    scale = heads.head_dim**-0.5
    q = q_TNH.transpose(0, 1).unsqueeze(0).contiguous()
    group = heads.num_heads // heads.num_kv_heads
    dense = cycle([(k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)) for k, v in pages.dense()])
    flops = 4.0 * length * length / 2 * heads.num_heads * heads.head_dim
    num_bytes = 2.0 * length * heads.head_dim * (2 * heads.num_heads + 2 * heads.num_kv_heads)

    def ours() -> Tensor:
        return varlen_attention(
            q_TNH, pages.next_layer(), pages.tables_SB, starts, pages.seq_lens_S, ScoreRule(scale=scale), length
        )

    def peer() -> Tensor:
        k, v = next(dense)
        with sdpa_kernel(_FLASH_FIRST, set_priority=True):
            return F.scaled_dot_product_attention(q, k, v, scale=scale, is_causal=True)

    return Prepared(ours, peer, num_bytes, flops)


def flash_case(query_lens: list[int], context: int, device: torch.device) -> Prepared:
    """Our attention, and as the peer FlashAttention as it would serve: over pages too, of the size that it asks for.

    Without a peer where torch has none that reads pages.
    """
    heads, batch = LLAMA_HEADS, len(query_lens)
    version = newest_flash(device)
    ours_in = _Pages(batch, context, heads, device)
    peers_in = _Pages(batch, context, heads, device, block_size=BLOCK_SIZE if version == 3 else 256)
    q_TNH = torch.randn(sum(query_lens), heads.num_heads, heads.head_dim, device=device).bfloat16()
    spec = AttentionSpec(layer=0, scale=heads.head_dim**-0.5)
    starts_S1 = torch.tensor([0, *accumulate(query_lens)], dtype=torch.int32, device=device)
    batch_in = BatchGeometry(
        starts_S1,
        peers_in.seq_lens_S,
        (peers_in.tables_SB,),
        (),
        max(query_lens),
        query_lens,
        [context] * batch,
    )

    def ours() -> Tensor:
        pages = ours_in.next_layer()
        return paged_attention(
            q_TNH, pages, ours_in.tables_SB, starts_S1, ours_in.seq_lens_S, spec.rule, max(query_lens)
        )

    def peer() -> Tensor:
        return flash_attention(q_TNH, peers_in.next_layer(), peers_in.tables_SB, batch_in, spec, version)

    has_peer = why_no_flash() is None
    num_bytes = 4.0 * batch * context * heads.num_kv_heads * heads.head_dim
    seen = sum(length * (context - (length - 1) / 2) for length in query_lens)
    return Prepared(ours, peer if has_peer else None, num_bytes, 4.0 * seen * heads.num_heads * heads.head_dim)


def _cascade(batch: int, shared: int, own: int, device: torch.device) -> Prepared:
    """The peer is our own attention without the knowledge that the prefix is shared."""
    heads = LLAMA_HEADS
    pages = _Pages(batch, shared + own, heads, device)
    num_common = shared // BLOCK_SIZE
    pages.tables_SB[:, :num_common] = pages.tables_SB[0, :num_common]
    q_SNH = torch.randn(batch, heads.num_heads, heads.head_dim, device=device).bfloat16()
    starts = torch.arange(batch + 1, dtype=torch.int32, device=device)
    scale = heads.head_dim**-0.5

    def ours() -> Tensor:
        return cascade_attention(
            q_SNH, pages.next_layer(), pages.tables_SB, starts, pages.seq_lens_S, ScoreRule(scale=scale), 1, num_common
        )

    def peer() -> Tensor:
        return decode_attention(q_SNH, pages.next_layer(), pages.tables_SB, pages.seq_lens_S, ScoreRule(scale=scale))

    num_bytes = 4.0 * (shared + batch * own) * heads.num_kv_heads * heads.head_dim
    flops = 4.0 * batch * (shared + own) * heads.num_heads * heads.head_dim
    return Prepared(ours, peer, num_bytes, flops)


def _norm(tokens: int, device: torch.device) -> Prepared:
    x_TD, weight_D = torch.randn(tokens, 4096, device=device).bfloat16(), torch.ones(4096, device=device).bfloat16()
    return Prepared(
        lambda: rms_norm(x_TD, weight_D, 1e-6),
        lambda: F.rms_norm(x_TD, (4096,), weight_D, 1e-6),
        2.0 * x_TD.nbytes,
        4.0 * x_TD.numel(),
    )


def _heads(tokens: int, device: torch.device) -> Prepared:
    heads = LLAMA_HEADS
    pages = _Pages(1, tokens, heads, device)
    all_heads = heads.num_heads + 2 * heads.num_kv_heads
    qkv_TMH = torch.randn(tokens, all_heads, heads.head_dim, device=device).bfloat16()
    angles = torch.rand(max(tokens, 1), heads.head_dim // 2, device=device)
    table_PR = torch.cat((angles.cos(), angles.sin()), dim=-1)
    positions_T = torch.arange(tokens, device=device)
    weight_H = torch.ones(heads.head_dim, device=device).bfloat16()

    def ours() -> Tensor:
        return prepare_heads(
            qkv_TMH,
            heads.num_heads,
            heads.num_kv_heads,
            table_PR,
            positions_T,
            pages.next_layer(),
            positions_T,
            q_norm_H=weight_H,
            k_norm_H=weight_H,
            eps=1e-6,
        )

    return Prepared(ours, None, 2.0 * qkv_TMH.nbytes, 10.0 * qkv_TMH.numel())


def _activation(tokens: int, device: torch.device) -> Prepared:
    x_TI = torch.randn(tokens, 2 * 14336, device=device).bfloat16()

    def peer() -> Tensor:
        gate, up = x_TI.chunk(2, dim=1)
        return F.silu(gate) * up

    return Prepared(lambda: gated_activation(x_TI, "silu"), peer, 1.5 * x_TI.nbytes, 3.0 * x_TI.numel())


def _sampling(batch: int, vocab_size: int, sampling: SamplingParams, device: torch.device) -> Prepared:
    """The peer is the usual program: a softmax over exponential noise, with a sort where the distribution is cut."""
    logits_RV = (torch.randn(batch, vocab_size, device=device) * 4).bfloat16()
    tokens_SM = torch.zeros(batch, 64, dtype=torch.int32, device=device)
    sampler = Sampler(vocab_size, 0, tokens_SM)
    for slot in range(batch):
        sampler.add(slot, NewRow(f"r{slot}", [1, 2], 2, sampling, ()))
    slots = np.arange(batch)
    lens = np.full(batch, 2, dtype=np.int64)
    rows = SampleRows(
        slots=slots,
        slots_R=torch.from_numpy(slots).to(device),
        lens=lens,
        lens_R=torch.from_numpy(lens.astype(np.int32)).to(device),
    )

    def draw(logits: Tensor) -> Tensor:
        probs = logits.softmax(1)
        return (probs / torch.empty_like(probs).exponential_(1.0)).argmax(1, keepdim=True)

    def peer() -> Tensor:
        if sampling.temperature == 0.0:
            return logits_RV.argmax(1)
        if sampling.top_k > 0 or sampling.top_p < 1.0:
            falling, ids = logits_RV.float().sort(1, descending=True)
            falling[:, max(sampling.top_k, 1) :] = -torch.inf
            probs = falling.softmax(1)
            falling.masked_fill_(probs.cumsum(1) - probs >= sampling.top_p, -torch.inf)
            return ids.gather(1, draw(falling))
        return draw(logits_RV.float())

    ours = partial(sampler.sample, logits_RV, rows)
    return Prepared(lambda: ours().token_ids_R, peer, float(logits_RV.nbytes), 0.0)


def _product(rows: int, inputs: int, outputs: int, device: torch.device) -> Prepared:
    """Quantising the activations is part of it; the peer is the product in bfloat16."""
    x_TI = torch.randn(rows, inputs, device=device).bfloat16()
    weight = torch.randn(outputs, inputs, device=device).bfloat16() * inputs**-0.5
    weight_OI, weight_scale = quantize_fp8(weight)

    def ours() -> Tensor:
        x_q, x_scale = quantize_fp8(x_TI)
        return scaled_matmul(x_q, x_scale, weight_OI, weight_scale, None, torch.bfloat16)

    num_bytes = weight_OI.nbytes + x_TI.nbytes + 2.0 * rows * outputs
    return Prepared(ours, lambda: F.linear(x_TI, weight), num_bytes, 2.0 * rows * inputs * outputs)


def _packed(rows: int, inputs: int, outputs: int, device: torch.device) -> Prepared:
    """In groups of 128 with zero points; the peer is the product in bfloat16."""
    x_TI = torch.randn(rows, inputs, device=device).bfloat16()
    weights = random_packed(outputs, inputs, device)
    weight_OI = weights.dequantize().bfloat16()
    num_bytes = weights.numbers.nbytes + weights.scales_OG.nbytes + x_TI.nbytes + 2.0 * rows * outputs
    flops = 2.0 * rows * inputs * outputs
    return Prepared(lambda: packed_matmul(x_TI, weights), lambda: F.linear(x_TI, weight_OI), num_bytes, flops)


def _few_rows(rows: int, inputs: int, outputs: int, device: torch.device) -> Prepared:
    """The peer is the library's product; the matrix is larger than a cache."""
    x_TI = torch.randn(rows, inputs, device=device).bfloat16()
    weight_OI = (torch.randn(outputs, inputs, device=device) * inputs**-0.5).bfloat16()
    num_bytes = weight_OI.nbytes + x_TI.nbytes + 2.0 * rows * outputs
    flops = 2.0 * rows * inputs * outputs
    return Prepared(lambda: few_rows_matmul(x_TI, weight_OI), lambda: F.linear(x_TI, weight_OI), num_bytes, flops)


def _experts(rows: int, of: ExpertSizes, in_four_bits: bool, device: torch.device) -> Prepared:
    """All from the routes to the sums. The peer is dense products in bfloat16 of the experts that are in use, each over
    as many rows as it has on average, without what is between them."""
    shapes = (of.num_experts, 2 * of.width, of.width), (of.num_experts, of.width, of.width)
    up, down = (_expert_weights(shape, in_four_bits, device) for shape in shapes)
    x_TD = torch.randn(rows, of.width, device=device).bfloat16()
    weights_TK, chosen_TK = torch.rand(rows, of.num_experts, device=device).topk(of.top_k, -1)
    experts_TK = chosen_TK.to(torch.int32)

    def ours() -> Tensor:
        blocks = align_experts(experts_TK, of.num_experts)
        gated = grouped_matmul(x_TD, up, blocks, x_TD.dtype, top_k=of.top_k, gate="swigluoai")
        return combine_experts(grouped_matmul(gated, down, blocks, x_TD.dtype), weights_TK, experts_TK)

    used = len(set(experts_TK.flatten().tolist()))
    average = x_TD[:1].repeat(max(1, round(rows * of.top_k / used)), 1)
    dense = [torch.randn(used, *shape[1:], device=device).bfloat16() for shape in shapes]

    def peer() -> list[Tensor]:
        return [F.linear(average, weight) for weights in dense for weight in weights]

    num_bytes = sum(each.nbytes for one in (up, down) for each in (one.values_EOI, one.scales) if each is not None)
    flops = 6.0 * rows * of.top_k * of.width * of.width
    return Prepared(ours, peer, num_bytes * used / of.num_experts + 2.0 * x_TD.nbytes, flops)


def _expert_weights(shape: tuple[int, int, int], in_four_bits: bool, device: torch.device) -> ExpertWeights:
    num_experts, outputs, inputs = shape
    bias = torch.randn(num_experts, outputs, device=device).bfloat16()
    if not in_four_bits:
        return ExpertWeights(torch.randn(shape, device=device).bfloat16() * inputs**-0.5, bias_EO=bias)
    codes = torch.randint(0, 256, (*shape[:2], inputs // 2), dtype=torch.uint8, device=device)
    return ExpertWeights(
        codes, torch.full((*shape[:2], inputs // 32), 120, dtype=torch.uint8, device=device), bias_EO=bias
    )


class _Pages:
    """Random pages of `batch` sequences of equal length, layer by layer."""

    def __init__(
        self,
        batch: int,
        length: int,
        heads: Heads,
        device: torch.device,
        order: Order = "blocks",
        block_size: int = BLOCK_SIZE,
    ) -> None:
        workload = AttentionWorkload(
            num_seqs=batch,
            query_len=1,
            seq_len=length,
            num_heads=heads.num_heads,
            num_kv_heads=heads.num_kv_heads,
            head_dim=heads.head_dim,
            block_size=block_size,
            order=order,
        )
        room = torch.cuda.mem_get_info(device)[0] / 2 if device.type == "cuda" else _ROOM_ON_A_CPU
        self._pages = RandomPages(workload.within(room), device)
        self._layers, self._length = count(), length
        self.tables_SB, self.seq_lens_S = self._pages.tables_SB, self._pages.seq_lens_S

    def next_layer(self) -> Tensor:
        """The `kv_cache` of a layer, another one at each call; the first at first."""
        return self._pages.layer(next(self._layers))

    def dense(self) -> list[tuple[Tensor, Tensor]]:
        """Keys and values [S, K, length, H], as torch's attention wants them, of as many layers as no cache holds."""
        first = self._dense(0)
        num_bytes = first[0].nbytes + first[1].nbytes
        turns = min(len(self._pages), -(-_MORE_THAN_A_CACHE // num_bytes))
        return [first, *(self._dense(layer) for layer in range(1, turns))]

    def _dense(self, layer: int) -> tuple[Tensor, Tensor]:
        pages = self._pages.layer(layer)[self.tables_SB.long()]  # [S, B, 2, K, block_size, H]
        kv = pages.permute(2, 0, 3, 1, 4, 5).flatten(3, 4)[..., : self._length, :].contiguous()
        return kv[0], kv[1]
