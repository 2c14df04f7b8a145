"""What uncast's plug-in takes from an engine, by name and signature, compared with an engine's sources without importing it.

A name that has gone, or a signature with other parameters, is where the plug-in would break; `uncast doctor --engines` says so
before a server does.
"""

from __future__ import annotations

import ast
from pathlib import Path

FILES: dict[str, dict[str, dict[str, str]]] = {
    "sglang": {
        "srt/plugins/__init__.py": {"load_plugins": "", "GENERAL_PLUGINS_GROUP": "="},
        "srt/plugins/hook_registry.py": {
            "HookRegistry.register": "cls, target, hook, hook_type=, *, source=",
            "HookType.AROUND": "=",
        },
        "srt/arg_groups/choices.py": {
            "ATTENTION_BACKEND_CHOICES": "=",
            "DRAFT_ATTENTION_BACKEND_CHOICES": "=",
            "CHUNKED_PREFIX_CACHE_SUPPORTED_ATTENTION_BACKENDS": "=",
            "add_attention_backend_choices": "=",
            "add_draft_attention_backend_choices": "=",
            "add_chunked_prefix_cache_attention_backend": "=",
        },
        "srt/layers/attention/attention_registry.py": {"register_attention_backend": "name", "ATTENTION_BACKENDS": "="},
        "srt/layers/attention/base_attn_backend.py": {
            "AttentionBackend.init_forward_metadata": "self, forward_batch",
            "AttentionBackend.init_forward_metadata_out_graph": "self, forward_batch, in_capture=",
            "AttentionBackend.init_forward_metadata_in_graph": "self, forward_batch",
            "AttentionBackend.init_cuda_graph_state": "self, max_bs, max_num_tokens",
            "AttentionBackend.get_cuda_graph_seq_len_fill_value": "self",
            "AttentionBackend.forward": "self, q, k, v, layer, forward_batch, save_kv_cache=, **kwargs",
            "AttentionBackend.forward_decode": "self, q, k, v, layer, forward_batch, save_kv_cache=, **kwargs",
            "AttentionBackend.forward_extend": "self, q, k, v, layer, forward_batch, save_kv_cache=, **kwargs",
            "AttentionBackend.verify_mask": "self",
            "AttentionBackend.update_verify_buffers_to_fill_after_draft": "self, spec_info, cuda_graph_bs",
            "AttentionBackend.needs_cpu_seq_lens": "=",
        },
        "srt/layers/attention/verify_mask.py": {
            "maybe_create_verify_mask": (
                "*, is_draft_runner, skip_prefill, max_bs, max_context_len, num_draft_tokens, device, is_read, dtype="
            ),
        },
        "srt/mem_cache/memory_pool.py": {
            "MLATokenToKVPool.set_mla_kv_buffer": "self, layer, loc_info, cache_k_nope, cache_k_rope, layer_id_override=",
            "MLATokenToKVPool.set_kv_buffer": "self, layer, loc_info, cache_k, cache_v, layer_id_override=",
            "MLATokenToKVPool.get_mla_kv_buffer": "self, layer, loc, dst_dtype=",
            "MLATokenToKVPool.get_key_buffer": "self, layer_id",
            "KVCache._check_physical_write_loc": "self, loc_info, where",
            "KVWriteLoc.for_batch": "cls, forward_batch, *, swa_loc=, full_loc=",
        },
        "srt/mem_cache/kv_index_translator.py": {
            "KVIndexTranslator.copy_page_table": "self, plan, *, out, kind=",
            "KVIndexTranslator.reads_are_translated": "self",
        },
        "srt/model_executor/forward_batch_info.py": {
            "ForwardMode.is_decode_or_idle": "self",
            "ForwardMode.is_target_verify": "self",
            "ForwardMode.is_draft_extend_v2": "self",
            "ForwardMode.is_extend_without_speculative": "self",
            "build_inner_fb_view": "forward_batch, *, bs, forward_mode, encoder_lens=",
        },
        "srt/runtime_context.py": {"attention_backends": "", "get_parallel": ""},
        "srt/models/deepseek_common/utils.py": {"FORWARD_ABSORB_CORE_ATTENTION_BACKENDS": "="},
        "srt/models/deepseek_common/attention_backend_handler.py": {
            "AttentionBackendRegistry.register": "cls, backend_name, handler_func"
        },
        "srt/models/deepseek_common/attention_forward_methods/forward_methods.py": {
            "AttnForwardMethod.MLA": "=",
            "AttnForwardMethod.MHA_CHUNKED_KV": "=",
        },
        "srt/speculative/draft_utils.py": {
            "DraftBackendFactory._create_backend": "self, backend_name, backend_map, error_template, stamps_children=",
        },
    },
}
"""Engine -> file below the package -> name -> parameters ("=" for what is assigned); as in SGLang 0.5.23."""


def interface_changes(engine: str, package: Path) -> list[str]:
    """What differs from `FILES`, one sentence each; empty where nothing does, or nothing is recorded for the engine."""
    changes = []
    for file, names in FILES.get(engine, {}).items():
        try:
            found = _members(ast.parse((package / file).read_text(encoding="utf-8")))
        except (OSError, SyntaxError, ValueError) as error:
            changes.append(f"{file} cannot be read ({type(error).__name__})")
            continue
        for name, wanted in names.items():
            if name not in found:
                changes.append(f"{file} has no {name}")
            elif found[name] != wanted:
                changes.append(f"{file}: {name} has the parameters ({found[name]}), not ({wanted})")
    return changes


def _members(tree: ast.Module) -> dict[str, str]:
    """Functions with their parameters and assigned names, of the module and of its classes."""
    found: dict[str, str] = {}
    for prefix, body in [("", tree.body), *((f"{n.name}.", n.body) for n in tree.body if isinstance(n, ast.ClassDef))]:
        for node in body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                found[prefix + node.name] = parameters(node.args)
            elif isinstance(node, ast.Assign):
                found |= {prefix + t.id: "=" for t in node.targets if isinstance(t, ast.Name)}
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                found[prefix + node.target.id] = "="
    return found


def parameters(args: ast.arguments) -> str:
    """Parameters without annotations, a default shown as `name=`."""
    positional = [*args.posonlyargs, *args.args]
    plain = len(positional) - len(args.defaults)
    parts = [a.arg + ("=" if i >= plain else "") for i, a in enumerate(positional)]
    if args.vararg:
        parts.append(f"*{args.vararg.arg}")
    elif args.kwonlyargs:
        parts.append("*")
    parts += [a.arg + ("" if d is None else "=") for a, d in zip(args.kwonlyargs, args.kw_defaults, strict=True)]
    if args.kwarg:
        parts.append(f"**{args.kwarg.arg}")
    return ", ".join(parts)
