"""Packages a trained master: FP8 128x128 blocks, config with `quantization_config`, tokenizer files, the held-out slice."""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

from checkpoint import BLOCK, to_fp8, to_hf
from evaluate import load
from safetensors.torch import save_file

QUANTIZATION = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [BLOCK, BLOCK],
    "modules_to_not_convert": ["model.embed_tokens", "lm_head"],
}


def export(master: Path, prepared: Path, out: Path, untie: bool = False) -> int:
    """Writes the package folder `out` and returns its size in bytes.

    `untie` adds copies of the embedding as `lm_head` and for the MTP layer, which vLLM and SGLang expect of this architecture.
    """
    out.mkdir(parents=True, exist_ok=True)
    model, _ = load(master)
    depth = model.c.num_hidden_layers
    unquantised = [f"model.layers.{n}.mlp.gate" for n in range(1, depth + 1)] + [f"model.layers.{depth}.eh_proj"]
    quantization = {**QUANTIZATION, "modules_to_not_convert": [*QUANTIZATION["modules_to_not_convert"], *unquantised]}
    config = {**model.c.to_hf(), "tie_word_embeddings": not untie, "quantization_config": quantization}
    (out / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    tensors = to_hf(model)
    if untie:
        names = ("lm_head", f"model.layers.{depth}.embed_tokens", f"model.layers.{depth}.shared_head.head")
        tensors |= {f"{name}.weight": tensors["model.embed_tokens.weight"].clone() for name in names}
    save_file(to_fp8(tensors), out / "model.safetensors", metadata={"format": "pt"})
    (out / "model.safetensors").chmod(0o644)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "heldout.txt"):
        shutil.copy(prepared / name, out / name)
    return sum(p.stat().st_size for p in out.iterdir())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--master", type=Path, required=True, help="the folder that train_tiny_glm.py wrote")
    parser.add_argument("--prepared", type=Path, required=True, help="the folder that prepare.py wrote")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--untie", action="store_true", help="write lm_head and the MTP layer's copies of the embedding too"
    )
    args = parser.parse_args()
    print(f"{export(args.master, args.prepared, args.out, args.untie):,} bytes")


if __name__ == "__main__":
    main()
