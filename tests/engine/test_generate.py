"""One streamed request over the paged pool."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.tiny_model import build_model_folder
from uncast.checkpoints.load import load_model
from uncast.engine.generate import Generation, stream
from uncast.engine.request import RequestError
from uncast.engine.runner import ModelRunner, RunnerError, Sequence
from uncast.engine.sampler import SamplingParams
from uncast.engine.tokenizer import TemplateError, Tokenizer
from uncast.latent.pool import OutOfPages
from uncast.models.decoder import MLADecoder

GREEDY = SamplingParams()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_model_folder(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def model(folder: Path) -> MLADecoder:
    return load_model(folder)


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer(folder)


def run(
    runner: ModelRunner, tokenizer: Tokenizer, prompt: list[int], max_tokens: int, **kwargs: object
) -> tuple[list[str], Generation]:
    result = Generation(prompt_tokens=len(prompt))
    pieces = list(stream(runner, tokenizer, prompt, GREEDY, max_tokens=max_tokens, result=result, **kwargs))  # type: ignore[arg-type]
    return pieces, result


def test_chunked_prefill_and_decode_equal_one_forward(model: MLADecoder) -> None:
    """Greedy continuation by steps equals the argmax of a forward over everything at once."""
    runner = ModelRunner(model, kv_layout="fp32", num_pages=30, page_size=16)
    tokens = torch.randint(0, 512, (300,), generator=torch.Generator().manual_seed(0)).tolist()
    steps, whole = Sequence(list(tokens)), Sequence(list(tokens))
    runner.ensure_pages(steps, 300)
    for count in (128, 1, 100, 71):
        logits = runner.step([(steps, count)])
    runner.free(steps)
    runner.ensure_pages(whole, 300)
    expected = runner.step([(whole, 300)])
    assert float((logits - expected).norm() / expected.norm()) < 1e-5
    runner.free(whole)
    runner.pool.check_integrity([])


def test_a_mixed_batch_equals_its_requests_alone(model: MLADecoder) -> None:
    runner = ModelRunner(model, kv_layout="fp8_ds_mla", num_pages=30, page_size=16)
    batch = [Sequence([(7 * i + k) % 512 for i in range(40 + k)]) for k in range(3)]
    alone = [Sequence(list(s.tokens)) for s in batch]
    for sequence in [*batch, *alone]:
        runner.ensure_pages(sequence, len(sequence.tokens))
    runner.step([(batch[0], 39), (batch[1], 10)])
    together = runner.step([(batch[0], 1), (batch[1], 31), (batch[2], 42)])
    for index, sequence in enumerate(alone):
        expected = runner.step([(sequence, len(sequence.tokens))])[0]
        assert float((together[index] - expected).norm() / expected.norm()) < 1e-4


def test_streamed_text_is_the_tokens_text_and_pages_come_back(model: MLADecoder, tokenizer: Tokenizer) -> None:
    runner = ModelRunner(model, num_pages=4)
    prompt = tokenizer.encode("the latent cache")
    pieces, result = run(runner, tokenizer, prompt, 30)
    assert "".join(pieces) == result.text
    assert result.tokens == 30 and result.finish_reason == "length" and result.decode_steps == 29
    assert run(runner, tokenizer, prompt, 30)[1].text == result.text
    runner.pool.check_integrity([])


def test_a_closed_stream_gives_its_pages_back(model: MLADecoder, tokenizer: Tokenizer) -> None:
    runner = ModelRunner(model, num_pages=4)
    prompt = tokenizer.encode("the latent cache is")
    pieces = stream(runner, tokenizer, prompt, GREEDY, max_tokens=50, result=Generation(len(prompt)))
    next(pieces)
    assert runner.pool.num_free < 4
    pieces.close()
    assert runner.pool.num_free == 4


def test_stop_strings_and_end_tokens_end_the_text(model: MLADecoder, tokenizer: Tokenizer) -> None:
    runner = ModelRunner(model, num_pages=4)
    prompt = tokenizer.encode("the latent cache")
    text = run(runner, tokenizer, prompt, 40)[1].text
    stop = text[8:11]
    _, result = run(runner, tokenizer, prompt, 40, stop=[stop])
    assert result.text == text[: text.index(stop)] and result.finish_reason == "stop"

    sequence = Sequence(list(prompt))
    runner.ensure_pages(sequence, len(prompt))
    first = int(runner.step([(sequence, len(prompt))]).argmax())
    ending = MLADecoder(
        replace(model.config, stop_token_ids=(first,)), model.embed, model.layers, model.final_norm, model.lm_head
    )
    _, result = run(ModelRunner(ending, num_pages=4), tokenizer, prompt, 40)
    assert (result.text, result.tokens, result.finish_reason) == ("", 0, "stop")


def test_step_bytes_are_live_rows_times_layers(model: MLADecoder, tokenizer: Tokenizer) -> None:
    prompt = tokenizer.encode("the latent cache")
    for layout, row in (("fp8_ds_mla", 656), ("fp8_e4m3", 576), ("bf16", 1152)):
        runner = ModelRunner(model, kv_layout=layout, num_pages=100)
        _, result = run(runner, tokenizer, prompt, 10)
        step, live = result.step_bytes, len(prompt) + 9
        assert step is not None
        assert step.needed == step.read == live * row * 2 and step.written == 0
        assert step.pool_cast == (100 * 64 * (row + 1152) * 2 if layout != "bf16" else 0)


def test_requests_that_do_not_fit_are_one_sentence(model: MLADecoder, tokenizer: Tokenizer) -> None:
    runner = ModelRunner(model, num_pages=2)
    cases = [
        ([], 5, "the prompt is empty"),
        ([1], 0, "max_tokens is 0"),
        ([1] * 100, 29, "exceed the KV pool of 128 tokens"),
    ]
    for prompt, max_tokens, sentence in cases:
        with pytest.raises(RequestError, match=sentence):
            run(runner, tokenizer, prompt, max_tokens)
    short = MLADecoder(
        replace(model.config, max_position_embeddings=64), model.embed, model.layers, model.final_norm, model.lm_head
    )
    with pytest.raises(RequestError, match="exceed the model's context of 64"):
        run(ModelRunner(short, num_pages=2), tokenizer, [1] * 60, 5)
    with pytest.raises(OutOfPages):
        runner.ensure_pages(Sequence([1]), 129)


def test_a_backend_that_computes_nonsense_is_refused_at_warm_up(
    model: MLADecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    from uncast.backends.torch_cpu import TorchCpuBackend

    honest = TorchCpuBackend.run

    def zeros(self: TorchCpuBackend, *args: object, **kwargs: object) -> None:
        honest(self, *args, **kwargs)  # type: ignore[arg-type]
        kwargs["out"].zero_()  # type: ignore[attr-defined]

    monkeypatch.setattr(TorchCpuBackend, "run", zeros)
    with pytest.raises(RunnerError, match="torch_cpu gives zeros only"):
        ModelRunner(model, num_pages=2)


def test_chat_template(tokenizer: Tokenizer) -> None:
    ids = tokenizer.chat([{"role": "user", "content": "the cache"}])
    assert tokenizer.decode(ids) == "<user>the cache<assistant>"
    with pytest.raises(TemplateError, match="unknown role robot"):
        tokenizer.chat([{"role": "robot", "content": "x"}])


def test_incremental_decoding_waits_for_whole_characters(tokenizer: Tokenizer) -> None:
    text = "naïve 🜁 ünïcode"
    decoder = tokenizer.stream()
    pieces = [decoder.push(token) for token in tokenizer.encode(text)]
    assert "".join(pieces) == text
    assert not any("�" in piece for piece in pieces)


def test_a_step_is_named_in_a_profile_as_the_doctor_reads_it() -> None:
    from uncast.doctor.labels import parse_label
    from uncast.engine.labels import step_label

    decode, mixed, prefill = (parse_label(step_label(x)) for x in ([(70, 1), (9, 1)], [(70, 1), (9, 9)], [(9, 9)]))
    assert decode is not None and (decode.phase, decode.batch, decode.live_tokens) == ("decode", 2, 79)
    assert mixed is not None and (mixed.phase, mixed.new_tokens, mixed.live_tokens) == ("mixed", 10, 79)
    assert prefill is not None and (prefill.phase, prefill.batch) == ("prefill", 1)
