"""`uncast doctor --engines`: the audit, the state of the plug-in, what would run; and the real sources where they are."""

from __future__ import annotations

import importlib.util
import json
import sys
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from uncast.cli.main import main
from uncast.doctor import engines
from uncast.doctor.engines_audit import audit
from uncast.doctor.engines_interface import FILES, interface_changes
from uncast.doctor.engines_rules import KV_DTYPES, Model, Setting, engine_default, uncast_backend

CASTS = {
    "direct": "k = self.pool.get_key_buffer(layer.layer_id).to(q.dtype)",
    "over lines": "k = self.pool.get_key_buffer(\n        layer.layer_id\n    ).to(\n        q.dtype\n    )",
    "by name": "k = self.pool.get_key_buffer(i)\n    k = k.to(torch.bfloat16)",
    "through views": "k = paged_view(self.pool.get_key_buffer(i)[:, :, : rank], 64)\n    return k.view(-1, 64, 1, 576).float()",
    "from a pair": "k, v = self.pool.get_kv_buffer(i)\n    return v.half()",
    "indexed pair": "kv = self.pool.get_kv_buffer(i)\n    return kv[0].type(q.dtype)",
    "in a branch": "k = self.pool.get_key_buffer(i) if fresh else other\n    return k.to(dtype=q.dtype)",
    "into another": "out.copy_(self.pool.get_value_buffer(i))",
}
NO_CASTS = {
    "reinterpreted": "k = self.pool.get_key_buffer(i).view(torch.float8_e4m3fn)",
    "to a device": "k = self.pool.get_key_buffer(i).to('cpu')\n    return k.to(self.device), k.to(device='cpu')",
    "another tensor": "k = k.view(-1, 1, 576).to(q.dtype)",
    "a name that changed": "k = self.pool.get_key_buffer(i)\n    k = new\n    return k.to(q.dtype)",
}


def package(tmp_path: Path, body: str, engine: str = "sglang", arguments: str = "self, q, i") -> Path:
    folder = tmp_path / engine / ("srt/layers/attention" if engine == "sglang" else "v1/attention")
    folder.mkdir(parents=True, exist_ok=True)
    (tmp_path / engine / "__init__.py").touch()
    (folder / "some_backend.py").write_text(f"class Backend:\n  def forward({arguments}):\n    {body}\n")
    return tmp_path / engine


@pytest.mark.parametrize("name", CASTS)
def test_a_cast_of_a_pool_is_found_with_its_line(tmp_path: Path, name: str) -> None:
    found = audit("sglang", package(tmp_path, CASTS[name])).casts
    assert [(c.kind, c.function) for c in found] == [("pool", "Backend.forward")]
    assert found[0].file == "sglang/srt/layers/attention/some_backend.py"
    line = 3 + (CASTS[name].count("\n") if name not in ("over lines",) else 0)
    assert found[0].line == line


@pytest.mark.parametrize("name", NO_CASTS)
def test_what_moves_nothing_or_is_no_pool_is_not_found(tmp_path: Path, name: str) -> None:
    assert not audit("sglang", package(tmp_path, NO_CASTS[name])).casts


def test_rows_picked_first_are_told_apart_and_broken_files_left_out(tmp_path: Path) -> None:
    root = package(tmp_path, "return self.pool.get_key_buffer(i)[kv_indices].contiguous().to(q.dtype)")
    assert [c.kind for c in audit("sglang", root).casts] == ["rows"]
    (root / "srt" / "broken.py").write_text("def get_key_buffer(:\n")
    assert audit("sglang", root).files == 1


def test_vllm_hands_caches_to_functions(tmp_path: Path) -> None:
    root = package(tmp_path, "return kv_c_and_k_pe_cache.to(q.dtype)", "vllm", "self, q, kv_c_and_k_pe_cache")
    assert [c.kind for c in audit("vllm", root).casts] == ["pool"]
    root = package(tmp_path, "kv_cache = q\n    return kv_cache.to(x)", "vllm", "self, q, kv_cache")
    assert not audit("vllm", root).casts


def test_a_changed_interface_is_named(tmp_path: Path) -> None:
    root = tmp_path / "sglang"
    for file, names in FILES["sglang"].items():
        path = root / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(_source(names))
    assert interface_changes("sglang", root) == []
    choices = root / "srt/arg_groups/choices.py"
    choices.write_text(choices.read_text().replace("add_attention_backend_choices", "add_backends"))
    base = root / "srt/layers/attention/base_attn_backend.py"
    base.write_text(base.read_text().replace("forward_batch, in_capture=None", "forward_batch"))
    (root / "srt/layers/attention/verify_mask.py").unlink()
    changes = interface_changes("sglang", root)
    assert len(changes) == 3 and all(
        any(word in c for c in changes)
        for word in ("add_attention_backend_choices", "init_forward_metadata_out_graph", "cannot be read")
    )


def _source(names: dict[str, str]) -> str:
    """A module that defines `names` with those parameters."""
    lines: dict[str, list[str]] = {}
    for name, parameters in names.items():
        owner, _, member = name.rpartition(".")
        shown = ", ".join(p + "None" if p.endswith("=") else p for p in parameters.split(", "))
        lines.setdefault(owner, []).append(f"{member} = 1" if parameters == "=" else f"def {member}({shown}): ...")
    parts = ["\n".join(lines.pop("", []))]
    return "\n".join([*parts, *(f"class {o}:\n  " + "\n  ".join(body) for o, body in lines.items())]) + "\n"


LOADER = {
    "live": "import uncast.integrations._common as c; c.plugin_state('sglang').live = True",
    "swallowed": "import uncast.integrations._common as c; c.plugin_state('sglang').error = 'ImportError: no kernels'",
    "never called": "pass",
    "broken engine": "raise RuntimeError('no driver')",
}


@pytest.mark.parametrize(
    ("name", "status", "words"),
    [
        ("live", "live", ""),
        ("swallowed", "not live", "ImportError: no kernels"),
        ("never called", "not live", "did not call it"),
        ("broken engine", "not checked", "no driver"),
    ],
)
def test_the_plugin_is_asked_in_a_process_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, status: str, words: str
) -> None:
    _fake_install(tmp_path, monkeypatch, LOADER[name])
    before = "sglang" in sys.modules
    plugin = engines.check_plugin("sglang")
    assert plugin.status == status and words in plugin.reason
    assert ("sglang" in sys.modules) is before, "the engine is imported by the child alone"


def _fake_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str) -> None:
    folder = tmp_path / "sglang" / "srt" / "plugins"
    folder.mkdir(parents=True)
    (tmp_path / "sglang" / "__init__.py").touch()
    (folder / "__init__.py").write_text(f"def load_plugins():\n    {body}\n")
    source = str(Path(engines.__file__).parents[2])
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{source}")
    monkeypatch.delenv("SGLANG_PLUGINS", raising=False)
    monkeypatch.setattr(
        engines.importlib.metadata, "entry_points", lambda group: [SimpleNamespace(name="uncast", group=group)]
    )


def test_a_missing_filtered_or_slow_plugin_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _fake_install(tmp_path, monkeypatch, "import time; time.sleep(60)")
    assert "within 1 second" in engines.check_plugin("sglang", seconds=1).reason
    monkeypatch.setenv("SGLANG_PLUGINS", "other, another")
    assert engines.check_plugin("sglang") == engines.Plugin(
        "not live", "SGLANG_PLUGINS=other, another leaves it out: add uncast"
    )
    monkeypatch.setattr(engines.importlib.metadata, "entry_points", lambda group: [])
    assert engines.check_plugin("sglang").status == "not installed"


def test_the_plugins_contract_is_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """The doctor's table of what serves, which needs no torch, against the backends' own answers."""
    torch = pytest.importorskip("torch")
    from uncast.attention import ProblemSpec, registry
    from uncast.integrations._common import candidates

    def able(name: str, spec: ProblemSpec) -> bool:
        wrapper, _, inner = name.partition(":")
        if not inner:
            cls = registry.backend_class(wrapper)
            return (cls().capability(spec) if wrapper == "native" else cls.capability(spec)).ok  # type: ignore[call-arg,arg-type]
        from dataclasses import replace

        return registry.backend_class(inner).capability(replace(spec, kv_layout="bf16")).ok  # type: ignore[call-arg,arg-type]

    arches, dims, heads = (
        (70, 75, 80, 86, 89, 90, 100, 103, 120),
        ((512, 64), (256, 64), (512, 32), (96, 64)),
        (1, 20, 128),
    )
    for arch, (rank, rope), num_heads, dtype in product(arches, dims, heads, ("auto", "fp8_e4m3")):
        spec = ProblemSpec(
            num_heads=num_heads, head_dim_ckv=rank, head_dim_kpe=rope, kv_layout="fp8_e4m3" if dtype != "auto" else "bf16",
            q_data_type=torch.bfloat16, arch=arch,
        )  # fmt: skip
        expected = next((name for name in candidates(spec) if able(name, spec)), "")
        assert uncast_backend(Model("", rank, rope, num_heads, False), Setting(arch, dtype))[0] == expected, spec


def test_engines_choose_as_their_sources_say() -> None:
    glm, r1 = Model("Glm4MoeLiteForCausalLM", 512, 64, 20, False), Model("DeepseekV3ForCausalLM", 512, 64, 128, False)
    sparse = Model("DeepseekV32ForCausalLM", 512, 64, 128, True)
    for dtype in KV_DTYPES:
        assert engine_default("sglang", glm, Setting(90, dtype)) == "fa3"
        assert engine_default("sglang", sparse, Setting(90, dtype)) == "dsa"
    assert engine_default("sglang", glm, Setting(100, "auto")) == "flashinfer"
    assert engine_default("sglang", r1, Setting(100, "auto")) == "trtllm_mla"
    assert engine_default("sglang", r1, Setting(89, "auto")) == "triton"
    assert engine_default("vllm", r1, Setting(90, "auto")) == "FLASH_ATTN_MLA"
    assert engine_default("vllm", r1, Setting(90, "fp8")) == "FLASHMLA"
    assert engine_default("vllm", r1, Setting(100, "fp8")) == "FLASHINFER_MLA"
    assert engine_default("vllm", r1, Setting(120, "fp8")) == "TRITON_MLA"
    assert uncast_backend(sparse, Setting(90, "auto"))[0] == ""


def _config(tmp_path: Path, **change: Any) -> Path:
    config = {
        "architectures": ["Glm4MoeLiteForCausalLM"], "kv_lora_rank": 512, "qk_rope_head_dim": 64, "num_attention_heads": 20,
        **change,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path / "config.json"


def test_command_reports_sources(tmp_path: Path, capsysbinary: Any) -> None:
    root = package(tmp_path, CASTS["direct"])
    (root / "srt/layers/attention/some_backend.py").rename(root / "srt/layers/attention/flashattention_backend.py")
    (tmp_path / "sglang-0.5.23.dist-info").mkdir()
    (tmp_path / "sglang-0.5.23.dist-info/METADATA").write_text("Name: sglang\nVersion: 0.5.23\n")
    arguments = ["doctor", "--engines", "--engine-path", str(tmp_path), "--model", str(_config(tmp_path))]
    assert main(arguments) == 0
    shown = capsysbinary.readouterr().out.decode()
    assert "sglang 0.5.23" in shown and "flashattention_backend.py:3" in shown
    assert "1 file with a pool, 1 cast of a whole pool, 0 of gathered rows" in shown
    assert "fa3, which casts the whole pool" in shown and "uncast: native" in shown
    assert main([*arguments, "--json", "--arch", "75"]) == 0
    (report,) = json.loads(capsysbinary.readouterr().out)
    assert report["choice"]["default"] == "triton" and report["choice"]["uncast"] == ""
    assert report["audit"]["casts"][0]["line"] == 3 and report["plugin"]["status"] == "not checked"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--engines", "--engine-path", "."], "holds neither"),
        (["--engines", "trace.json"], "takes no trace"),
        (["--engines", "--arch", "90"], "give a model's config.json"),
        (["--engines", "--model", "missing.json"], "cannot read missing.json"),
        (["--engine-path", "."], "go with --engines"),
        (["--engines", "--arch", "9", "--model", "config.json"], "such as 90"),
    ],
)
def test_bad_use_is_one_sentence(
    arguments: list[str], words: str, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["doctor", *arguments]) == 2
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1


def test_models_without_mla_are_refused(tmp_path: Path, capsys: Any) -> None:
    assert main(["doctor", "--engines", "--model", str(_config(tmp_path, kv_lora_rank=None))]) == 2
    assert "no model with MLA" in capsys.readouterr().err
    (tmp_path / "config.json").write_text("{")
    assert main(["doctor", "--engines", "--model", str(tmp_path)]) == 2
    assert "is no JSON" in capsys.readouterr().err


SGLANG = engines.installed("sglang") if importlib.util.find_spec("sglang") else None


@pytest.mark.skipif(SGLANG is None, reason="SGLang is not installed here")
def test_the_real_sources_hold_the_known_casts_and_the_interface_we_use() -> None:
    assert SGLANG is not None
    assert interface_changes("sglang", SGLANG) == []
    pool = [
        c.file.rsplit("/", 1)[-1] for c in audit("sglang", SGLANG).casts if c.kind == "pool" and "/layers/" in c.file
    ]
    assert pool.count("flashinfer_mla_backend.py") >= 2 and pool.count("flashattention_backend.py") >= 2
