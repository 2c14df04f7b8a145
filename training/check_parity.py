"""Compares the training module with transformers' Glm4MoeLiteForCausalLM on one checkpoint folder (default: random weights).

transformers builds `q_a_layernorm` and `kv_a_layernorm` with eps 1e-6 whatever the config says; engines and this model use
`rms_norm_eps`, so the check sets it on the transformers side. The MTP layer is not part of that class.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

import torch
from checkpoint import to_hf
from evaluate import load
from model import ModelConfig, MoE, TinyGlm
from safetensors.torch import save_file
from transformers import Glm4MoeLiteForCausalLM

TOLERANCE = 1e-4


def random_model() -> TinyGlm:
    torch.manual_seed(0)
    model = TinyGlm(ModelConfig())
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.ndim == 1:
                p.normal_(1.0, 0.2)
            elif name.endswith("router"):
                p.normal_(0.0, 0.1)
        for block in model.blocks():
            if isinstance(block.mlp, MoE):
                block.mlp.bias.normal_(0.0, 0.1)
    return model.eval()


@torch.no_grad()
def difference(model: TinyGlm) -> float:
    """Relative error ||ours - theirs|| / ||theirs|| of the logits of 2 x 192 random tokens, fp32."""
    depth = model.c.num_hidden_layers
    tensors = {k: v for k, v in to_hf(model).items() if not k.startswith(f"model.layers.{depth}.")}
    with tempfile.TemporaryDirectory() as folder:
        save_file(tensors, Path(folder) / "model.safetensors", metadata={"format": "pt"})
        config = {**model.c.to_hf(), "dtype": "float32"}
        (Path(folder) / "config.json").write_text(json.dumps(config))
        theirs, report = Glm4MoeLiteForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
        )
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if report[kind]:
            raise SystemExit(f"transformers reports {kind}: {sorted(report[kind])[:5]}")
    for layer in theirs.model.layers:
        layer.self_attn.q_a_layernorm.variance_epsilon = model.c.rms_norm_eps
        layer.self_attn.kv_a_layernorm.variance_epsilon = model.c.rms_norm_eps
    tokens = torch.randint(model.c.vocab_size, (2, 192), generator=torch.Generator().manual_seed(1))
    expected = theirs(tokens).logits
    got = model.logits(model.hidden(tokens)[0])
    return float((got - expected).norm() / expected.norm())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a checkpoint folder (FP8 weights are dequantised first)")
    args = parser.parse_args()
    model = load(args.model)[0] if args.model else random_model()
    error = difference(model)
    print(f"relative error of the logits: {error:.2e} (allowed {TOLERANCE:.0e})")
    if error > TOLERANCE:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
