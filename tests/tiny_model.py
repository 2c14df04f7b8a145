"""A random model folder with a byte-level tokenizer and a chat template, small enough for every test run."""

from __future__ import annotations

import json
from pathlib import Path

from tests.fixtures import build_hf

TEMPLATE = (
    "{% for m in messages %}{% if m.role not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('unknown role ' + m.role) }}{% endif %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def build_model_folder(folder: Path, family: str = "glm4_moe_lite", **overrides: object) -> Path:
    """Writes weights, config, tokenizer.json and tokenizer_config.json to `folder`; 2 layers unless told otherwise."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    build_hf(family, folder, **{"num_hidden_layers": 2, **overrides})
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=512, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(["the latent cache is read as it is stored"] * 20, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    return folder
