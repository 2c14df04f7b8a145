"""`IndexerConfig`: the lightning indexer of DeepSeek sparse attention, read from a Hugging Face `config.json`."""

from __future__ import annotations

from dataclasses import dataclass

from uncast.models.fields import ConfigError, Fields

FULL, SHARED = "full", "shared"
_PATTERN = {"F": FULL, "S": SHARED}
_FAMILIES = ("deepseek_v32", "glm_moe_dsa")
_INTERLEAVED = ("glm_moe_dsa",)
_SPARSE_LAYERS = ("indexed_attention", "deepseek_sparse_attention")
"""What transformers and NVIDIA's checkpoints call a layer with sparse attention in `layer_types`."""


@dataclass(frozen=True)
class IndexerConfig:
    """Which tokens a query attends to.

    Attributes:
        num_heads, head_dim: of the indexer's queries; its one key per token has head_dim channels, the first
            qk_rope_head_dim of them rotated.
        topk: tokens that a query attends to at most.
        interleaved: rope pairs (0, 1), (2, 3), ... as in GLM; DeepSeek's are (0, 32), (1, 33), ...
        kinds: for each layer, "full" (has an indexer and keys of its own) or "shared" (attends to the tokens that the last
            full layer before it chose).
    """

    num_heads: int
    head_dim: int
    topk: int
    interleaved: bool
    kinds: tuple[str, ...]

    @property
    def full_layers(self) -> tuple[int, ...]:
        """Layers with an indexer, in order; the n-th has the n-th layer of the index cache."""
        return tuple(index for index, kind in enumerate(self.kinds) if kind == FULL)

    @classmethod
    def from_hf(cls, reader: Fields, model_type: str, num_layers: int, rope_dim: int) -> IndexerConfig | None:
        """None for a family without sparse attention.

        Raises:
            ConfigError: a missing field, a layer that is not sparse, or shared layers before the first full one.
        """
        if model_type not in _FAMILIES:
            return None
        if "q_lora_rank" not in reader:
            raise ConfigError("config.json has no q_lora_rank, from which the indexer makes its queries")
        if "layer_types" in reader:
            reader.choices("layer_types", num_layers, _SPARSE_LAYERS)
        head_dim = reader.integer("index_head_dim")
        if head_dim < rope_dim:
            raise reader.fault("index_head_dim", f"at least qk_rope_head_dim, {rope_dim}, is needed")
        kinds = _kinds(reader, num_layers)
        if kinds[0] != FULL:
            raise ConfigError("config.json gives the first layer no indexer, so it has no tokens to attend to")
        return cls(
            num_heads=reader.integer("index_n_heads"),
            head_dim=head_dim,
            topk=reader.integer("index_topk"),
            interleaved=reader.boolean("indexer_rope_interleave", model_type in _INTERLEAVED),
            kinds=kinds,
        )


def _kinds(reader: Fields, num_layers: int) -> tuple[str, ...]:
    """`indexer_types`, else `index_topk_pattern` ("FSSF..." or a list), else every `index_topk_freq`-th layer from
    `index_skip_topk_offset` - 1 on, and all before; as transformers derives it."""
    if "indexer_types" in reader:
        return reader.choices("indexer_types", num_layers, (FULL, SHARED))
    if "index_topk_pattern" in reader:
        pattern = reader.raw["index_topk_pattern"]
        if not isinstance(pattern, str):
            return reader.choices("index_topk_pattern", num_layers, (FULL, SHARED))
        if len(pattern) < num_layers or not set(pattern) <= set(_PATTERN):
            raise reader.fault("index_topk_pattern", f"{num_layers} letters F or S are needed")
        return tuple(_PATTERN[letter] for letter in pattern[:num_layers])
    every = max(1, reader.integer("index_topk_freq", 1, low=0))
    offset = reader.integer("index_skip_topk_offset", 2, low=0)
    return tuple(FULL if max(index - offset + 1, 0) % every == 0 else SHARED for index in range(num_layers))
