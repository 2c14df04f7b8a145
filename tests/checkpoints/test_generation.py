"""generation_config.json: what counts, and one sentence for what is senseless."""

from __future__ import annotations

from pathlib import Path

import pytest

from uncast.checkpoints.files import CheckpointError
from uncast.checkpoints.generation import FILE, GenerationConfig, read_generation_config


def read(folder: Path, text: str) -> GenerationConfig:
    (folder / FILE).write_text(text)
    return read_generation_config(folder, 100)


def test_sampling_values_count_only_when_the_model_samples(tmp_path: Path) -> None:
    assert read_generation_config(tmp_path, 100) == GenerationConfig()
    values = '"temperature": 0.5, "top_p": 0.9, "top_k": 20, "min_p": 0, "eos_token_id": 3'
    every = {"temperature": 0.5, "top_p": 0.9, "top_k": 20, "min_p": 0.0}
    assert read(tmp_path, f'{{"do_sample": true, {values}}}') == GenerationConfig(True, every, (3,))
    assert read(tmp_path, f'{{"do_sample": false, {values}}}') == GenerationConfig(stop_token_ids=(3,))
    assert read(tmp_path, f"{{{values}}}") == GenerationConfig(stop_token_ids=(3,))
    assert read(tmp_path, '{"do_sample": true, "temperature": 0, "top_p": null}').sampling == {"temperature": 0.0}


@pytest.mark.parametrize("value", ['"hot"', "[1]", "{}", "NaN", "-1", "1e999", "true", "9" * 400, "101"])
@pytest.mark.parametrize("name", ["temperature", "top_p", "top_k", "min_p"])
def test_senseless_values_are_one_sentence(tmp_path: Path, name: str, value: str) -> None:
    if (name, value) == ("top_k", "101"):
        assert read(tmp_path, '{"do_sample": true, "top_k": 101}').sampling == {"top_k": 101}
        return
    with pytest.raises(CheckpointError, match=f"{FILE} has {name} = ") as caught:
        read(tmp_path, f'{{"do_sample": true, "{name}": {value}}}')
    assert "is needed" in str(caught.value) and len(str(caught.value)) < 400


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ('{"do_sample": "false"}', "do_sample = 'false': true or false is needed"),
        ('{"do_sample": true, "top_p": 0}', "top_p = 0: a positive number up to 1 is needed"),
        ('{"do_sample": true, "top_k": 50.7}', "top_k = 50.7: a non-negative integer is needed"),
        ("[]", "holds JSON of type list, not an object"),
        ("null", "holds JSON of type NoneType, not an object"),
    ],
)
def test_more_senseless_files(tmp_path: Path, text: str, sentence: str) -> None:
    with pytest.raises(CheckpointError, match=sentence):
        read(tmp_path, text)
