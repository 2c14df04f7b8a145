"""`generation_config.json`: the model's own sampling defaults and end tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from uncast.checkpoints.files import CheckpointError, read_json_if_there
from uncast.checkpoints.gguf_file import companion_folder
from uncast.models.fields import Fields

FILE = "generation_config.json"


@dataclass(frozen=True)
class GenerationConfig:
    """What a model says about generating with it.

    Attributes:
        sampled: do_sample; otherwise the model wants to be greedy and its sampling values mean nothing.
        sampling: temperature, top_p, top_k and min_p, those that are given; empty unless `sampled`.
        stop_token_ids: ids that end generation, besides those of config.json.
    """

    sampled: bool = False
    sampling: Mapping[str, float] = field(default_factory=dict)
    stop_token_ids: tuple[int, ...] = ()


def read_generation_config(folder: Path, vocab_size: int) -> GenerationConfig:
    """The file of a folder, or beside a GGUF file; all defaults if there is none.

    Raises:
        CheckpointError: it is not a JSON object, or a value is of the wrong type or out of range.
    """
    path = companion_folder(folder) / FILE
    fields = Fields(read_json_if_there(path), str(path), CheckpointError)
    ids = fields.integers("eos_token_id", low=0, high=vocab_size - 1)
    if not fields.boolean("do_sample", False):
        return GenerationConfig(stop_token_ids=ids)
    sampling: dict[str, float] = {}
    if "temperature" in fields:
        sampling["temperature"] = fields.optional("temperature", high=100.0)
    if "top_p" in fields:
        sampling["top_p"] = fields.number("top_p", high=1.0)
    if "top_k" in fields:
        sampling["top_k"] = fields.integer("top_k", low=0)
    if "min_p" in fields:
        sampling["min_p"] = fields.optional("min_p", high=1.0)
    return GenerationConfig(True, sampling, ids)
