"""Writes a Hugging Face checkpoint of a published model's layer shapes with random weights, for measuring servers.

    python benchmarks/random_checkpoint.py DIR --layers 12 --seconds 30

Every server reads the same files, tokenizer included: tokens are words, so that each one shows in a streamed answer. Matrices
are uniform and seeded by name, queries three times as large as the rest: scores of attention then deviate by about 2 and it is
not uniform, and the residual stream stays finite through any number of layers. Layers are written until `--seconds` are over or
half of the disk's free space is used; config.json has as many as there are.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import time
import zlib
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers

from uncast.checkpoints.implied import implied_tensors
from uncast.checkpoints.quantization import Quantization
from uncast.models.config import ModelConfig

GLM_47_FLASH: dict[str, Any] = {
    "architectures": ["Glm4MoeLiteForCausalLM"], "model_type": "glm4_moe_lite", "torch_dtype": "bfloat16",
    "hidden_size": 2048, "num_attention_heads": 20, "num_key_value_heads": 20, "q_lora_rank": 768, "kv_lora_rank": 512,
    "qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "v_head_dim": 256, "intermediate_size": 10240,
    "moe_intermediate_size": 1536, "n_routed_experts": 64, "num_experts_per_tok": 4, "n_shared_experts": 1,
    "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 1.8,
    "topk_method": "noaux_tc", "scoring_func": "sigmoid", "vocab_size": 154880, "max_position_embeddings": 202752,
    "rope_theta": 1e6, "rms_norm_eps": 1e-5, "hidden_act": "silu", "tie_word_embeddings": False,
    "num_nextn_predict_layers": 0, "attention_bias": False, "eos_token_id": 154879, "pad_token_id": 154879,
}  # fmt: skip
TOY = GLM_47_FLASH | {
    "hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 64, "qk_nope_head_dim": 64,
    "v_head_dim": 64, "intermediate_size": 256, "moe_intermediate_size": 128, "n_routed_experts": 8, "vocab_size": 2048,
    "num_experts_per_tok": 2, "eos_token_id": 2047, "pad_token_id": 2047,
}  # fmt: skip
WRITERS = 4
"""Files written at a time: making their bytes takes a core each."""


def fields(shapes: dict[str, Any], layers: int) -> dict[str, Any]:
    """config.json of so many layers."""
    return shapes | {"num_hidden_layers": layers, "mlp_layer_types": ["dense"] + ["sparse"] * (layers - 1)}


def draw(name: str, shape: tuple[int, ...], dtype: str, device: str) -> torch.Tensor:
    """A tensor of the model, on the CPU: norms 1, biases 0, matrices uniform with a deviation of 0.03 (queries 0.09)."""
    kind = torch.float32 if dtype == "F32" else torch.bfloat16
    if len(shape) < 2:
        return torch.full(shape, 1.0 if "norm" in name else 0.0, dtype=kind)
    width = math.sqrt(3) * (0.09 if "q_b_proj" in name else 0.03)
    generator = torch.Generator(device).manual_seed(zlib.crc32(name.encode()))
    return torch.empty(shape, dtype=kind, device=device).uniform_(-width, width, generator=generator).cpu()


def write_tokenizer(folder: Path, vocab: int) -> None:
    """Token 17 is the word `w17`; the last one ends a text."""
    words = {f"w{number}": number for number in range(vocab - 1)} | {"</s>": vocab - 1}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>", "model_max_length": 202752}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")


def shards(shapes: dict[str, Any], layers: int) -> Iterator[list[tuple[str, str, tuple[int, ...]]]]:
    """(name, dtype, shape) of the tensors of each file: first what is outside of the layers, then one layer a file."""
    tensors = implied_tensors(ModelConfig.from_hf(fields(shapes, layers)), Quantization())
    named = [(tensor.name, tensor.dtype, tuple(tensor.shape)) for tensor in tensors]
    yield [tensor for tensor in named if not tensor[0].startswith("model.layers.")]
    for layer in range(layers):
        yield [tensor for tensor in named if tensor[0].startswith(f"model.layers.{layer}.")]


def write(folder: Path, shapes: dict[str, Any], layers: int, seconds: float, device: str) -> int:
    """Writes the checkpoint; how many layers it has, at least 2."""
    folder.mkdir(parents=True, exist_ok=True)
    end, room = time.monotonic() + seconds, shutil.disk_usage(folder).free // 2
    where: dict[str, str] = {}
    written, size, under_way = -1, 0, list[Future[None]]()
    with ThreadPoolExecutor(WRITERS) as pool:
        for number, tensors in enumerate(shards(shapes, layers)):
            while sum(not future.done() for future in under_way) >= WRITERS:
                time.sleep(0.01)
            made = {name: draw(name, shape, dtype, device) for name, dtype, shape in tensors}
            more = sum(tensor.nbytes for tensor in made.values())
            if number > 2 and (time.monotonic() > end or size + more > room):
                break
            size += more
            file = f"model-{number:05}.safetensors"
            where |= dict.fromkeys(made, file)
            under_way.append(pool.submit(save_file, made, folder / file, {"format": "pt"}))
            written += 1
        for future in under_way:
            future.result()
    index = {"metadata": {"total_size": size}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    (folder / "config.json").write_text(json.dumps(fields(shapes, written)), encoding="utf-8")
    (folder / "generation_config.json").write_text(
        json.dumps({"eos_token_id": shapes["eos_token_id"]}), encoding="utf-8"
    )
    write_tokenizer(folder, shapes["vocab_size"])
    return written


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, default=12, help="at most (default: %(default)s; GLM-4.7-Flash has 47)")
    parser.add_argument("--seconds", type=float, default=30.0, help="for writing (default: %(default)g)")
    parser.add_argument("--toy", action="store_true", help="small widths, to try the scripts")
    args = parser.parse_args()
    began, device = time.monotonic(), "cuda" if torch.cuda.is_available() else "cpu"
    layers = write(args.folder, TOY if args.toy else GLM_47_FLASH, max(2, args.layers), args.seconds, device)
    size = sum(file.stat().st_size for file in args.folder.iterdir()) / 1e9
    print(f"{args.folder}: {layers} layers, {size:.1f} GB, {time.monotonic() - began:.1f} s", flush=True)


if __name__ == "__main__":
    main()
