"""`survey`: a checkpoint's configuration and file headers to everything that `uncast inspect` says about it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from uncast.checkpoints.consistency import check_headers
from uncast.checkpoints.files import CheckpointError, read_json
from uncast.checkpoints.gguf_file import GgufFile, gguf_path
from uncast.checkpoints.implied import implied_tensors
from uncast.checkpoints.inventory import Module, gguf_modules, modules, read_headers
from uncast.checkpoints.load import load_config
from uncast.checkpoints.quantization import Quantization, read_quantization
from uncast.models.config import ModelConfig


@dataclass(frozen=True)
class FormatRow:
    """Layers that store one part in the same format.

    Attributes:
        layers: None outside the layers.
        formats: format -> bytes, the largest first.
        parameters, nbytes: of all these layers together.
    """

    part: str
    layers: tuple[int, ...] | None
    formats: Mapping[str, int]
    parameters: int
    nbytes: int


@dataclass(frozen=True)
class Survey:
    """A checkpoint.

    Attributes:
        modules: as stored; implied by the configuration if `stored` is False.
        kv_scales: layers with a scale for the KV cache in the checkpoint.
        notes: what a reader has to know about these figures, a sentence each.
    """

    path: Path
    config: ModelConfig
    modules: Sequence[Module]
    stored: bool
    kv_scales: int
    notes: tuple[str, ...]

    @property
    def parameters(self) -> int:
        """Of the layers that decode; without multi-token prediction."""
        return sum(module.parameters for module in self.modules if module.part != "MTP")

    def formats(self) -> list[FormatRow]:
        """Parts in the order of the model, neighbouring layers of one format together."""
        return _format_rows(self.modules)


def survey(path: Path) -> Survey:
    """Reads `config.json` and the headers of a folder's weights, or a GGUF file's metadata.

    Raises:
        CheckpointError: neither of them, a configuration that is not supported, a missing or damaged file.
    """
    config, notes = load_config(path), list[str]()
    gguf = gguf_path(path)
    if gguf is not None:
        found = gguf_modules(GgufFile(gguf).tensors, config.num_layers)
        size = 2 * sum(module.parameters for module in found if module.part != "MTP") / 1e9
        notes.append(f"uncast multiplies GGUF blocks out when it loads them: {size:,.1f} GB in BF16")
        return Survey(path, config, found, True, 0, tuple(notes))
    raw = read_json(path / "config.json")
    declared = _declared(path, raw, notes)
    tensors = read_headers(path)
    stored = bool(tensors)
    if not stored:
        tensors = implied_tensors(config, declared)
        notes.append(f"no weights in this folder: bytes are implied by config.json, {_ASSUMED[declared.kind]}")
    else:
        check_headers(tensors, config, declared, path)
    found = modules(tensors, config.num_layers)
    if not any(module.part == "attention" for module in found):
        raise CheckpointError(f"{path} holds no attention weights under Hugging Face's names")
    scales = len({module.layer for module in found if module.format == "KV scale"})
    if scales == 0 and declared.fp8_cache:
        notes.append("the checkpoint asks for an FP8 KV cache but holds no scale for it: engines then use 1.0")
    return Survey(path, config, found, stored, scales, tuple(notes))


def _declared(folder: Path, raw: Mapping[str, Any], notes: list[str]) -> Quantization:
    """What the folder says of its quantisation; a method that cannot be loaded is noted and counts as none."""
    try:
        return read_quantization(folder, raw)
    except CheckpointError as error:
        notes.append(f"uncast cannot load these weights: {error}")
        return Quantization()


_ASSUMED = {"none": "all in BF16", "fp8": "weights in FP8 blocks", "nvfp4": "NVFP4 but for the excluded modules"}


_ORDER = (
    "embedding", "attention", "indexer", "dense MLP", "router", "experts", "shared experts", "norms", "other", "LM head",
    "MTP",
)  # fmt: skip


def _format_rows(found: Sequence[Module]) -> list[FormatRow]:
    by_place: dict[tuple[str, int | None], list[Module]] = defaultdict(list)
    for module in found:
        by_place[module.part, module.layer].append(module)
    by_formats: dict[tuple[str, tuple[str, ...], bool], list[Module]] = defaultdict(list)
    for (part, layer), group in by_place.items():
        names = tuple(sorted({module.format for module in group if module.parameters}))
        by_formats[part, names, layer is None].extend(group)
    rows = []
    for (part, _, outside), group in by_formats.items():
        bytes_of: dict[str, int] = defaultdict(int)
        for module in group:
            bytes_of[module.format] += module.nbytes
        layers = tuple(sorted({module.layer for module in group if module.layer is not None}))
        rows.append(
            FormatRow(
                part,
                None if outside else layers,
                dict(sorted(bytes_of.items(), key=lambda item: -item[1])),
                sum(module.parameters for module in group),
                sum(module.nbytes for module in group),
            )
        )
    return sorted(rows, key=lambda row: (_ORDER.index(row.part), row.layers or ()))
