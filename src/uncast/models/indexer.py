"""The lightning indexer of DeepSeek sparse attention: which cached tokens a query attends to.

Per full layer, with x the layer's normed input and c_q the query latent (q_a's output, normed):

    k = layer_norm(k_proj x), its first qk_rope_head_dim channels rotated       one key per token, stored in the index cache
    q = q_b c_q as [heads, head_dim], rotated alike
    w = weights_proj(x) / sqrt(heads * head_dim)                                signed, float32
    score[t] = sum_h w_h relu(q_h . k_t); the query attends to the topk tokens with the largest scores

A shared layer attends to the tokens of the last full layer before it. DeepSeek's own code also multiplies q and k by a Hadamard
matrix, which changes no dot product. Source: DeepSeek-V3.2-Exp's report, section 2.1; GLM-5.2's sharing: arXiv 2603.12201.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional as F

from uncast.attention import Problem
from uncast.backends.lightning_indexer import select_tokens
from uncast.latent.index_keys import IndexLayout, store_keys
from uncast.models.fused import on_kernels, rotate, wide_linear
from uncast.models.indexer_config import IndexerConfig
from uncast.models.rope import Rope
from uncast.quant.matmul import linear
from uncast.quant.packed import Weight

K_NORM_EPS = 1e-6
"""Of the key's layer norm, whatever the configuration says of the others."""


@dataclass
class IndexerWeights:
    """Weights of one full layer.

    Attributes:
        q_b [heads * head_dim, q_lora_rank], k [head_dim, hidden]; both may be packed.
        k_norm, k_norm_bias [head_dim]; weights float32 [heads, hidden].
        layer: which layer of the index cache is this one's.
    """

    q_b: Weight
    k: Weight
    k_norm: torch.Tensor
    k_norm_bias: torch.Tensor
    weights: torch.Tensor
    layer: int


@dataclass
class IndexCache:
    """The index keys of all full layers, uint8 [num_index_layers, num_pages, page_size, row_bytes], and their layout."""

    storage: torch.Tensor
    layout: IndexLayout


@dataclass
class Indexer:
    """The indexers of a model.

    Attributes:
        rope: with this family's pairing of channels, which need not be attention's.
    """

    config: IndexerConfig
    rope: Rope

    def store(
        self,
        weights: IndexerWeights,
        x: torch.Tensor,
        angles: tuple[torch.Tensor, torch.Tensor],
        cache: IndexCache,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Writes the keys of x [n, hidden]."""
        keys, interleaved = linear(x, weights.k), self.rope.config.interleaved
        if on_kernels(keys):
            from uncast.kernels.index_write import serves, write_keys

            if serves(cache.layout):
                norm, storage = (weights.k_norm, weights.k_norm_bias, K_NORM_EPS), cache.storage[weights.layer]
                return write_keys(keys, *norm, angles, interleaved, storage, slot_mapping, cache.layout)
        keys = F.layer_norm(keys, keys.shape[-1:], weights.k_norm, weights.k_norm_bias, K_NORM_EPS)
        store_keys(cache.storage[weights.layer], self._rotate(keys, angles), slot_mapping, cache.layout)

    def select(
        self,
        weights: IndexerWeights,
        x: torch.Tensor,
        c_q: torch.Tensor,
        angles: tuple[torch.Tensor, torch.Tensor],
        cache: IndexCache,
        problem: Problem,
    ) -> torch.Tensor:
        """int32 [n, topk], what the queries of x [n, hidden] and c_q [n, q_lora_rank] attend to; their keys are stored."""
        config = self.config
        q = linear(c_q, weights.q_b).view(-1, config.num_heads, config.head_dim)
        scale = (config.num_heads * config.head_dim) ** -0.5
        head_weights = wide_linear(x, weights.weights, scale)
        if on_kernels(q):
            rotate(self.rope, q[..., : self.rope.config.dim], angles)
        else:
            q = self._rotate(q, angles)
        return select_tokens(q, head_weights, cache.storage[weights.layer], problem, cache.layout)

    def _rotate(self, x: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """x [..., head_dim] with its first rope channels rotated."""
        width = self.rope.config.dim
        return torch.cat([self.rope.rotate(x[..., :width], angles), x[..., width:]], dim=-1)
