"""Held-out bits per byte, MTP acceptance and sample texts of a `tiny-glm` checkpoint (latent cache not quantised)."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from checkpoint import from_fp8, from_hf
from data import prefix_ids
from model import ModelConfig, TinyGlm
from numpy.typing import NDArray
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor

IGNORE = -100


@dataclass(frozen=True)
class Score:
    """Means over the scored tokens; losses in nats per token."""

    loss: float
    bits_per_byte: float
    mtp_loss: float
    mtp_acceptance: float


def windows(ids: NDArray[np.uint16], seq_len: int, prefix: list[int]) -> Tensor:
    """Cuts a text into windows `prefix + text`, at most `seq_len + 1` tokens each, padded with -100; int64 [N, seq_len + 1].

    Every token of the text is in exactly one window, so that a sum over windows scores each token once.
    """
    room = seq_len + 1 - len(prefix)
    rows = [prefix + ids[i : i + room].tolist() for i in range(0, len(ids), room)]
    return torch.tensor([r + [IGNORE] * (seq_len + 1 - len(r)) for r in rows])


@torch.no_grad()
def score(model: TinyGlm, rows: Tensor, n_bytes: int, prefix_len: int, batch: int = 8) -> Score:
    """Scores windows; `n_bytes` is the UTF-8 length of their text. The prefix is context, never scored."""
    device = model.embed_tokens.device
    nll = mtp_nll = 0.0
    n = m = hits = 0
    model.eval()
    for part in torch.split(rows, batch):
        part = part.to(device)
        tokens, target = part[:, :-1].clamp(min=0), part[:, 1:].clone()
        target[:, : prefix_len - 1] = IGNORE
        mtp_target = F.pad(target[:, 1:], (0, 1), value=IGNORE)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            hidden, _ = model.hidden(tokens)
            logits = model.logits(hidden)
            mtp_logits = model.logits(model.mtp_hidden(hidden, part[:, 1:].clamp(min=0))[0])
        nll += F.cross_entropy(logits.float().flatten(0, 1), target.flatten(), reduction="sum").item()
        mtp_nll += F.cross_entropy(mtp_logits.float().flatten(0, 1), mtp_target.flatten(), reduction="sum").item()
        valid = mtp_target[:, :-1] != IGNORE
        hits += int(((mtp_logits[:, :-1].argmax(-1) == logits[:, 1:].argmax(-1)) & valid).sum())
        n += int((target != IGNORE).sum())
        m += int(valid.sum())
    return Score(nll / n, nll / math.log(2) / n_bytes, mtp_nll / max(m, 1), hits / max(m, 1))


@torch.no_grad()
def generate(
    model: TinyGlm,
    prompts: list[list[int]],
    max_tokens: int,
    temperature: float,
    top_p: float,
    seed: int,
    stop: Iterable[int],
) -> list[list[int]]:
    """Continues prompts of equal or different length, recomputing the whole context every step. Temperature 0 is greedy."""
    device = model.embed_tokens.device
    generator = torch.Generator().manual_seed(seed)
    stops = set(stop)
    outputs: list[list[int]] = []
    model.eval()
    for prompt in prompts:
        ids = list(prompt)
        for _ in range(max_tokens):
            with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
                hidden, _ = model.hidden(torch.tensor([ids[-model.c.max_position_embeddings :]], device=device))
            logits = model.logits(hidden[0, -1].float()).cpu()
            token = int(logits.argmax()) if temperature == 0 else _draw(logits / temperature, top_p, generator)
            if token in stops:
                break
            ids.append(token)
        outputs.append(ids[len(prompt) :])
    return outputs


def _draw(logits: Tensor, top_p: float, generator: torch.Generator) -> int:
    probs, order = logits.softmax(-1).sort(descending=True)
    probs = torch.where(probs.cumsum(-1) - probs < top_p, probs, torch.zeros_like(probs))
    return int(order[torch.multinomial(probs, 1, generator=generator)])


def load(folder: Path) -> tuple[TinyGlm, Tokenizer]:
    """Model (fp32, FP8 weights dequantised) and tokenizer of a package folder or of the sharded bf16 master."""
    known = {f.name for f in fields(ModelConfig)}
    config = ModelConfig(**{k: v for k, v in json.loads((folder / "config.json").read_text()).items() if k in known})
    tensors: dict[str, Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(path)
    return from_hf(config, from_fp8(tensors)), Tokenizer.from_file(str(folder / "tokenizer.json"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--model", type=Path, required=True, help="folder with config.json, *.safetensors, tokenizer.json"
    )
    parser.add_argument("--text", type=Path, required=True, help="held-out UTF-8 text")
    parser.add_argument("--seq-len", type=int, default=1024)
    args = parser.parse_args()
    model, tokenizer = load(args.model)
    text = args.text.read_text(encoding="utf-8")
    prefix = prefix_ids(tokenizer)
    ids = np.array(tokenizer.encode(text, add_special_tokens=False).ids, dtype=np.uint16)
    result = score(model, windows(ids, args.seq_len, prefix), len(text.encode()), len(prefix))
    print(json.dumps({"tokens": len(ids), "bytes": len(text.encode()), "seq_len": args.seq_len, **vars(result)}))


if __name__ == "__main__":
    main()
