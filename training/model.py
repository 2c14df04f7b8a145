"""The training form of `glm4_moe_lite`: multi-head latent attention, sigmoid-routed experts and one MTP layer.

Attention runs un-absorbed (keys and values are expanded from the latent). All experts are computed for every token as one
wide MLP whose hidden units are gated by the router's weights: for a small model that is faster than gathering, and equal.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class ModelConfig:
    """Shape of the model; field names are those of the Hugging Face config."""

    vocab_size: int = 4096
    hidden_size: int = 384
    intermediate_size: int = 384
    moe_intermediate_size: int = 128
    num_hidden_layers: int = 6
    num_attention_heads: int = 4
    n_routed_experts: int = 6
    num_experts_per_tok: int = 2
    q_lora_rank: int = 128
    kv_lora_rank: int = 512
    qk_nope_head_dim: int = 64
    qk_rope_head_dim: int = 64
    v_head_dim: int = 64
    routed_scaling_factor: float = 1.8
    max_position_embeddings: int = 2048
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-5

    def to_hf(self) -> dict[str, object]:
        """The `config.json` of the checkpoint, without `quantization_config`."""
        return {
            "architectures": ["Glm4MoeLiteForCausalLM"],
            "model_type": "glm4_moe_lite",
            **asdict(self),
            "num_key_value_heads": self.num_attention_heads,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "mlp_layer_types": ["dense"] + ["sparse"] * (self.num_hidden_layers - 1),
            "n_group": 1,
            "topk_group": 1,
            "topk_method": "noaux_tc",
            "scoring_func": "sigmoid",
            "norm_topk_prob": True,
            "num_nextn_predict_layers": 1,
            "hidden_act": "silu",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "rope_interleave": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": self.rope_theta},
            "tie_word_embeddings": True,
            "initializer_range": 0.02,
            "bos_token_id": None,
            "pad_token_id": 0,
            "eos_token_id": [0, 4],
            "dtype": "bfloat16",
        }


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight, computed in fp32; every norm of the model uses the config's `rms_norm_eps`."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        y = x.float()
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.eps)
        return (y * self.weight.float()).to(x.dtype)


def rope_table(length: int, dim: int, theta: float, device: torch.device) -> tuple[Tensor, Tensor]:
    """(cos, sin), fp32 [length, dim / 2]."""
    inv_freq = theta ** -(torch.arange(0, dim, 2, dtype=torch.float32, device=device) / dim)
    angle = torch.arange(length, dtype=torch.float32, device=device)[:, None] * inv_freq
    return angle.cos(), angle.sin()


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates the interleaved pairs (x0, x1), (x2, x3), ... of [..., S, dim]; the pairs stay interleaved."""
    even, odd = x.float()[..., 0::2], x.float()[..., 1::2]
    return torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1).flatten(-2).to(x.dtype)


class Attention(nn.Module):
    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        self.c = c
        heads, dn, dr, dv = c.num_attention_heads, c.qk_nope_head_dim, c.qk_rope_head_dim, c.v_head_dim
        self.q_a_proj = nn.Linear(c.hidden_size, c.q_lora_rank, bias=False)
        self.q_a_layernorm = RMSNorm(c.q_lora_rank, c.rms_norm_eps)
        self.q_b_proj = nn.Linear(c.q_lora_rank, heads * (dn + dr), bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(c.hidden_size, c.kv_lora_rank + dr, bias=False)
        self.kv_a_layernorm = RMSNorm(c.kv_lora_rank, c.rms_norm_eps)
        self.kv_b_proj = nn.Linear(c.kv_lora_rank, heads * (dn + dv), bias=False)
        self.o_proj = nn.Linear(heads * dv, c.hidden_size, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        c = self.c
        dn, dr, dv = c.qk_nope_head_dim, c.qk_rope_head_dim, c.v_head_dim
        b, s, _ = x.shape
        q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x))).view(b, s, -1, dn + dr).transpose(1, 2)
        ckv, kpe = self.kv_a_proj_with_mqa(x).split((c.kv_lora_rank, dr), dim=-1)
        kv = self.kv_b_proj(self.kv_a_layernorm(ckv)).view(b, s, -1, dn + dv).transpose(1, 2)
        k_nope, v = kv.split((dn, dv), dim=-1)
        q = torch.cat((q[..., :dn], apply_rope(q[..., dn:], cos, sin)), dim=-1)
        kpe = apply_rope(kpe.unsqueeze(1), cos, sin).expand(-1, k_nope.shape[1], -1, -1)
        k = torch.cat((k_nope, kpe), dim=-1)
        v = F.pad(v, (0, dn + dr - dv))  # the fused kernels want equal widths
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=(dn + dr) ** -0.5)
        y: Tensor = self.o_proj(out[..., :dv].transpose(1, 2).flatten(2))
        return y


class DenseMLP(nn.Module):
    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.up_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.down_proj = nn.Linear(c.intermediate_size, c.hidden_size, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x)), x.new_zeros(1, dtype=torch.float32)


class MoE(nn.Module):
    """Routed experts 0..E-1 and, as slice E, the shared one, in three tensors: gate and up [E+1, I, D], down [D, E+1, I]."""

    bias: Tensor

    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        self.c = c
        slices = c.n_routed_experts + 1
        self.router = nn.Parameter(torch.empty(c.n_routed_experts, c.hidden_size))
        self.register_buffer("bias", torch.zeros(c.n_routed_experts))
        self.gate_proj = nn.Parameter(torch.empty(slices, c.moe_intermediate_size, c.hidden_size))
        self.up_proj = nn.Parameter(torch.empty(slices, c.moe_intermediate_size, c.hidden_size))
        self.down_proj = nn.Parameter(torch.empty(c.hidden_size, slices, c.moe_intermediate_size))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(output like x, fraction of the routed choices that each expert got, fp32 [E])."""
        with torch.autocast(x.device.type, enabled=False):
            scores = F.linear(x.float(), self.router.float()).sigmoid()
            chosen = (scores + self.bias).topk(self.c.num_experts_per_tok, dim=-1).indices
            mask = torch.zeros_like(scores).scatter(-1, chosen, 1.0)
            weights = scores * mask
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20) * self.c.routed_scaling_factor
        gates = torch.cat((weights, torch.ones_like(weights[..., :1])), dim=-1).to(x.dtype).unsqueeze(-1)
        hidden = F.silu(F.linear(x, self.gate_proj.flatten(0, 1))) * F.linear(x, self.up_proj.flatten(0, 1))
        hidden = (hidden.view(*x.shape[:-1], -1, self.c.moe_intermediate_size) * gates).flatten(-2)
        return F.linear(hidden, self.down_proj.flatten(1)), mask.flatten(0, -2).mean(0) / self.c.num_experts_per_tok


class Block(nn.Module):
    def __init__(self, c: ModelConfig, dense: bool, dropout: float) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.self_attn = Attention(c)
        self.post_attention_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.mlp: DenseMLP | MoE = DenseMLP(c) if dense else MoE(c)
        self.dropout = dropout

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        x = x + F.dropout(self.self_attn(self.input_layernorm(x), cos, sin), self.dropout, self.training)
        y, load = self.mlp(self.post_attention_layernorm(x))
        return x + F.dropout(y, self.dropout, self.training), load


class TinyGlm(nn.Module):
    """The decoder and its MTP layer. Embedding and head are one matrix, shared by the MTP layer."""

    def __init__(self, c: ModelConfig, dropout: float = 0.0) -> None:
        super().__init__()
        self.c = c
        self.dropout = dropout
        self.embed_tokens = nn.Parameter(torch.empty(c.vocab_size, c.hidden_size))
        self.layers = nn.ModuleList(Block(c, n == 0, dropout) for n in range(c.num_hidden_layers))
        self.norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.enorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.hnorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.eh_proj = nn.Linear(2 * c.hidden_size, c.hidden_size, bias=False)
        self.mtp_block = Block(c, False, dropout)
        self.shared_head_norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.init_weights()

    def init_weights(self) -> None:
        """Normal with standard deviation 0.5 / sqrt(fan in), branch outputs scaled down by depth; embedding and router 0.02."""
        depth = (2 * self.c.num_hidden_layers) ** -0.5
        for name, p in self.named_parameters():
            if p.ndim < 2:
                continue
            fan_in = p.shape[1] * p.shape[2] if name.endswith("down_proj") else p.shape[-1]
            std = 0.02 if name == "embed_tokens" or name.endswith("router") else 0.5 * fan_in**-0.5
            nn.init.normal_(p, std=std * depth if ("o_proj" in name or "down_proj" in name) else std)

    def blocks(self) -> list[Block]:
        return [*self.layers, self.mtp_block]

    def hidden(self, tokens: Tensor) -> tuple[Tensor, list[Tensor]]:
        """tokens [B, S] -> (hidden after the final norm [B, S, D], expert loads per MoE layer)."""
        cos, sin = rope_table(tokens.shape[1], self.c.qk_rope_head_dim, self.c.rope_theta, tokens.device)
        x = F.dropout(self.embed(tokens), self.dropout, self.training)
        loads = []
        for layer in self.layers:
            x, load = layer(x, cos, sin)
            loads.append(load)
        return self.norm(x), loads[1:]

    def mtp_hidden(self, hidden: Tensor, next_tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Hidden of position i and token i+1 -> MTP hidden (after `shared_head.norm`) that predicts token i+2, [B, S, D].

        Its input is eh_proj(cat(enorm(embedding of token i+1), hnorm(hidden after the final norm))), as in vLLM and SGLang.
        """
        cos, sin = rope_table(next_tokens.shape[1], self.c.qk_rope_head_dim, self.c.rope_theta, next_tokens.device)
        x = self.eh_proj(torch.cat((self.enorm(self.embed(next_tokens)), self.hnorm(hidden)), dim=-1)).float()
        x, load = self.mtp_block(x, cos, sin)
        return self.shared_head_norm(x), load

    def embed(self, tokens: Tensor) -> Tensor:
        return F.embedding(tokens, self.embed_tokens)

    def logits(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.embed_tokens)
