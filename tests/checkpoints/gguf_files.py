"""Writes what transformers saved as GGUF, with the names, shapes and metadata of llama.cpp's converter."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import torch
from gguf import GGMLQuantizationType as Kind
from gguf.quants import dequantize, quantize
from safetensors.torch import load_file

ARCHITECTURES = {
    "glm_moe_dsa": "glm-dsa", "deepseek_v32": "deepseek32", "deepseek_v2": "deepseek2", "deepseek_v3": "deepseek2",
    "glm4_moe_lite": "deepseek2",
}  # fmt: skip
NAMES = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
    "self_attn.q_a_proj": "attn_q_a", "self_attn.q_a_layernorm": "attn_q_a_norm", "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa", "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.o_proj": "attn_output", "self_attn.indexer.wq_b": "indexer.attn_q_b", "self_attn.indexer.wk": "indexer.attn_k",
    "self_attn.indexer.k_norm": "indexer.k_norm", "self_attn.indexer.weights_proj": "indexer.proj", "mlp.gate": "ffn_gate_inp",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    "mlp.shared_experts.gate_proj": "ffn_gate_shexp", "mlp.shared_experts.up_proj": "ffn_up_shexp",
    "mlp.shared_experts.down_proj": "ffn_down_shexp",
}  # fmt: skip
MIXED = [Kind.Q8_0, Kind.Q4_0, Kind.Q5_1, Kind.F16, Kind.BF16, Kind.Q5_0, Kind.F32, Kind.Q4_1]


def gguf_tensors(folder: Path, *, joined_kv_b: bool = False) -> dict[str, torch.Tensor]:
    """float32 tensors under GGUF's names."""
    config, found = json.loads((folder / "config.json").read_text()), dict[str, torch.Tensor]()
    tensors = {k: v.float() for k, v in load_file(folder / "model.safetensors").items()}
    heads, nope, rank = config["num_attention_heads"], config["qk_nope_head_dim"], config["kv_lora_rank"]
    for name, tensor in tensors.items():
        if not name.startswith("model.layers."):
            outside = {"model.embed_tokens.weight": "token_embd", "model.norm.weight": "output_norm"}
            found[outside.get(name, "output") + ".weight"] = tensor
            continue
        _, _, layer, rest = name.split(".", 3)
        block, (module, _, kind) = f"blk.{layer}.", rest.rpartition(".")
        if rest.endswith("e_score_correction_bias"):
            found[block + "exp_probs_b.bias"] = tensor
        elif ".experts." in rest:
            part = rest.split(".")[-2].removesuffix("_proj")
            key = f"{block}ffn_{part}_exps.weight"
            if key not in found:
                pattern = name.split("experts.")[0] + "experts.{}." + f"{part}_proj.weight"
                count = config["n_routed_experts"]
                found[key] = torch.stack([tensors[pattern.format(e)] for e in range(count)])
        elif module.endswith("kv_b_proj") and not joined_kv_b:
            rows = tensor.view(heads, -1, rank)
            found[block + "attn_k_b.weight"] = rows[:, :nope].transpose(1, 2).contiguous()
            found[block + "attn_v_b.weight"] = rows[:, nope:].contiguous()
        else:
            found[f"{block}{NAMES.get(module, 'attn_kv_b')}.{kind}"] = tensor
    return found


def write_file(writer: gguf.GGUFWriter) -> None:
    """Writes and closes what was added."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_gguf(
    folder: Path,
    path: Path,
    kinds: list[Kind],
    *,
    joined_kv_b: bool = False,
    types: bool = True,
    overrides: dict[str, Any] | None = None,
) -> dict[str, torch.Tensor]:
    """The file; returns the values that its tensors stand for. `kinds` take turns over the matrices; vectors stay float32."""
    config = json.loads((folder / "config.json").read_text())
    writer = gguf.GGUFWriter(path, ARCHITECTURES[config["model_type"]])
    for key, value in {**metadata(config, types), **(overrides or {})}.items():
        add = {
            bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string,
            list: writer.add_array,
        }[type(value)]  # fmt: skip
        add(key, value)
    meant = {}
    for index, (name, tensor) in enumerate(gguf_tensors(folder, joined_kv_b=joined_kv_b).items()):
        kind = Kind.F32 if tensor.dim() == 1 or "ffn_gate_inp" in name else kinds[index % len(kinds)]
        if tensor.shape[-1] % 32 and kind not in (Kind.F32, Kind.F16, Kind.BF16):
            kind = Kind.F16
        data = quantize(tensor.numpy(), kind)
        writer.add_tensor(name, data, raw_dtype=kind)
        meant[name] = torch.from_numpy(dequantize(data, kind).copy()).view(tensor.shape)
    write_file(writer)
    return meant


def metadata(config: dict[str, Any], types: bool) -> dict[str, Any]:
    """As llama.cpp's converter writes it, one multi-token prediction layer counted in."""
    arch, nope, rope = ARCHITECTURES[config["model_type"]], config["qk_nope_head_dim"], config["qk_rope_head_dim"]
    sigmoid, rank = config["model_type"] != "deepseek_v2", config["kv_lora_rank"]
    params = config["rope_parameters"]
    fields: dict[str, Any] = {
        "block_count": config["num_hidden_layers"] + 1, "nextn_predict_layers": 1,
        "context_length": config["max_position_embeddings"], "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"], "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": 1, "attention.key_length": rank + rope, "attention.value_length": rank,
        "attention.key_length_mla": nope + rope, "attention.value_length_mla": config["v_head_dim"],
        "attention.kv_lora_rank": rank, "attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        "rope.dimension_count": rope, "rope.freq_base": float(params["rope_theta"]),
        "leading_dense_block_count": config["mlp_layer_types"].count("dense") if "mlp_layer_types" in config
        else config["first_k_dense_replace"],
        "expert_count": config["n_routed_experts"], "expert_used_count": config["num_experts_per_tok"],
        "expert_shared_count": config["n_shared_experts"], "expert_feed_forward_length": config["moe_intermediate_size"],
        "expert_weights_scale": float(config["routed_scaling_factor"]), "expert_weights_norm": sigmoid,
        "expert_gating_func": 2 if sigmoid else 1, "expert_group_count": config.get("n_group") or 1,
        "expert_group_used_count": config.get("topk_group") or 1,
    }  # fmt: skip
    if config.get("q_lora_rank"):
        fields["attention.q_lora_rank"] = config["q_lora_rank"]
    if params["rope_type"] == "yarn":
        fields |= {
            "rope.scaling.type": "yarn", "rope.scaling.factor": float(params["factor"]),
            "rope.scaling.original_context_length": params["original_max_position_embeddings"],
            "rope.scaling.yarn_log_multiplier": 0.1 * params["mscale_all_dim"],
        }  # fmt: skip
    if "index_topk" in config:
        fields |= {
            "attention.indexer.head_count": config["index_n_heads"], "attention.indexer.top_k": config["index_topk"],
            "attention.indexer.key_length": config["index_head_dim"],
        }  # fmt: skip
        if types and config.get("indexer_types"):
            fields["attention.indexer.types"] = [kind == "full" for kind in config["indexer_types"]]
    return {f"{arch}.{key}": value for key, value in fields.items()}
