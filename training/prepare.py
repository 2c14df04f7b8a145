"""Turns the text file into what training reads: tokenizer, token streams, chat samples, held-out windows."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import numpy as np
from chat import CHAT_TEMPLATE, encode_chats
from data import (
    SPECIAL_TOKENS,
    documents,
    encode_stream,
    heldout_slice,
    read_text,
    save_arrays,
    split,
    train_tokenizer,
)
from numpy.typing import NDArray

TOKENIZER_CONFIG = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "model_max_length": 2048,
    "clean_up_tokenization_spaces": False,
    "eos_token": "<|endoftext|>",
    "pad_token": "<|endoftext|>",
    "additional_special_tokens": SPECIAL_TOKENS,
    "chat_template": CHAT_TEMPLATE,
}
GENERATION_CONFIG = {"eos_token_id": [0, 4], "pad_token_id": 0, "do_sample": True, "temperature": 0.8, "top_p": 0.95}


def prepare(data: Path, out: Path, vocab_size: int, chats: int, seed: int) -> None:
    """Writes tokenizer files, `train`, `chat`, `val` arrays (uint16 ids, offsets), `heldout.txt` and `meta.json` to `out`."""
    out.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    train, held = split(documents(read_text(data)))
    tokenizer = train_tokenizer(train, vocab_size)
    tokenizer.save(str(out / "tokenizer.json"), pretty=False)
    (out / "tokenizer_config.json").write_text(json.dumps(TOKENIZER_CONFIG, indent=1) + "\n")
    (out / "generation_config.json").write_text(json.dumps(GENERATION_CONFIG, indent=1) + "\n")
    (out / "heldout.txt").write_text(heldout_slice(held), encoding="utf-8")
    ids, starts = encode_stream(tokenizer, train)
    chat_ids, chat_starts = encode_chats(tokenizer, train, chats, seed)
    texts = [f.text for f in held]
    val = [e.ids for e in tokenizer.encode_batch(texts, add_special_tokens=False)]
    arrays: dict[str, NDArray[np.generic]] = {
        "train": ids,
        "train_starts": starts,
        "chat": chat_ids,
        "chat_starts": chat_starts,
        "val": np.array([t for v in val for t in v], dtype=np.uint16),
        "val_lengths": np.array([len(v) for v in val], dtype=np.int64),
    }
    val_bytes = sum(len(t.encode()) for t in texts)
    meta = {
        "vocab_size": tokenizer.get_vocab_size(),
        "val_bytes": val_bytes,
        "train_chars": sum(len(f.text) for f in train),
    }
    save_arrays(out, arrays, {**meta, "held_out": [f.source for f in held]})
    counts = f"{len(ids)} training tokens, {len(chat_ids)} chat, {sum(map(len, val))} held out"
    print(f"prepared in {time.monotonic() - began:.0f} s: {counts}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--vocab-size", type=int, default=4096)
    parser.add_argument("--chats", type=int, default=16000)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    prepare(args.data, args.out, args.vocab_size, args.chats, args.seed)


if __name__ == "__main__":
    main()
