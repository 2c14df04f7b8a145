"""A Hugging Face folder or a GGUF file to an `MLADecoder`, layer by layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from uncast.checkpoints.files import CheckpointError, read_json
from uncast.checkpoints.generation import read_generation_config
from uncast.checkpoints.gguf_config import hf_config
from uncast.checkpoints.gguf_file import GgufFile, gguf_path
from uncast.checkpoints.gguf_source import GgufSource
from uncast.checkpoints.layer_loader import LayerLoader, Source, mtp_prefix
from uncast.checkpoints.source import SafetensorsSource
from uncast.models.config import ConfigError, ModelConfig
from uncast.models.decoder import MLADecoder
from uncast.models.parallel import Parallel, local_config
from uncast.quant.packed import (
    DEFAULT_CACHE_BYTES,
)

Progress = Callable[[int, int], None]
"""Called with (layers loaded, layers in all)."""
Note = Callable[[str], None]
"""Called with a sentence about the checkpoint that is no error."""


def load_config(folder: Path, *, latent_norm_eps: float | None = None) -> ModelConfig:
    """The model configuration of a folder or a GGUF file; its end tokens are those of config.json (or of the metadata) and of
    generation_config.json.

    Raises:
        CheckpointError: in one sentence that names the folder.
    """
    gguf = gguf_path(folder)
    if gguf is None and not folder.is_dir():
        raise CheckpointError(f"{folder} is not a folder with a model in it")
    raw = read_json(folder / "config.json") if gguf is None else hf_config(GgufFile(gguf))
    return _config(folder, raw, latent_norm_eps)


def _config(folder: Path, raw: Mapping[str, Any], latent_norm_eps: float | None) -> ModelConfig:
    try:
        config = ModelConfig.from_hf(raw, latent_norm_eps=latent_norm_eps)
    except ConfigError as error:
        raise CheckpointError(f"{folder}: {error}") from None
    more = read_generation_config(folder, config.vocab_size).stop_token_ids
    return replace(config, stop_token_ids=tuple(dict.fromkeys((*config.stop_token_ids, *more))))


def open_source(folder: Path) -> tuple[Mapping[str, Any], Source]:
    """The fields of config.json, or of a GGUF file's metadata, and the tensors.

    Raises:
        CheckpointError: in one sentence that names the file.
    """
    gguf = gguf_path(folder)
    if gguf is not None:
        source = GgufSource(gguf)
        return hf_config(source.file), source
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not a folder with a model in it")
    raw = read_json(folder / "config.json")
    return raw, SafetensorsSource(folder, raw)


def load_model(
    folder: Path,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    latent_norm_eps: float | None = None,
    progress: Progress | None = None,
    note: Note | None = None,
    keep_packed: bool = True,
    cache_bytes: int = DEFAULT_CACHE_BYTES,
    parallel: Parallel | None = None,
    mtp: bool = False,
) -> MLADecoder:
    """Loads a checkpoint, layer by layer: a folder with `config.json` and safetensors, or a GGUF file.

    Args:
        dtype: of the weights in memory that are not packed, and of the activations.
        latent_norm_eps: see `ModelConfig.from_hf`.
        keep_packed: MLPs, experts and projections stored as NVFP4 or FP8 blocks stay so; otherwise they are multiplied out.
        cache_bytes: of dequantised matrices kept on a CPU, see `DequantCache`.
        parallel: the group among whose ranks the model is shared; only this rank's part stays in memory.
        mtp: load the layer that predicts the token after the next, too; see `mtp_refusal`.

    Raises:
        CheckpointError: in one sentence that names the file or tensor.
    """
    raw, source = open_source(folder)
    config = _config(folder, raw, latent_norm_eps)
    loader = LayerLoader(config, source, dtype, torch.device(device), keep_packed, cache_bytes, parallel)
    embed = loader.get("model.embed_tokens.weight", config.vocab_size, config.hidden_size)
    layers = []
    for index in range(config.num_layers):
        layers.append(loader.layer(index))
        if progress is not None:
            progress(index + 1, config.num_layers)
    final_norm = loader.get("model.norm.weight", config.hidden_size)
    lm_head = (
        embed if config.tie_word_embeddings else loader.get("lm_head.weight", config.vocab_size, config.hidden_size)
    )
    if parallel is not None:
        rows = parallel.range_of(config.vocab_size)
        lm_head = lm_head[rows.start : rows.stop].clone()
        config = local_config(config, parallel)
    drafts = loader.mtp() if mtp else None
    model = MLADecoder(config, embed, layers, final_norm, lm_head, parallel=parallel, mtp=drafts)
    if note is not None:
        for sentence in loader.notes(layers):
            note(sentence)
    return model


def mtp_refusal(folder: Path) -> str | None:
    """Why a checkpoint's MTP layer cannot draft, one sentence; None if it can.

    Raises:
        CheckpointError: see `open_source`.
    """
    raw, source = open_source(folder)
    config = _config(folder, raw, None)
    if config.indexer is not None:
        return f"{folder.name} has sparse attention, whose MTP layer uncast does not run: speculation is off"
    if isinstance(source, GgufSource):
        return f"{folder.name} is a GGUF file, whose MTP layer uncast does not read: speculation is off"
    if mtp_prefix(config) + "eh_proj.weight" not in source:
        return f"{folder.name} has no MTP layer to draft with: speculation is off"
    return None
