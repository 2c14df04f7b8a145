"""Reads, by `ast`, the parts of vLLM's sources that the backend UNCAST is written against.

    python -m tests.integrations.vllm_interface PATH_TO_VLLM_PACKAGE > tests/integrations/vllm_interface.json

The file holds names of parameters, fields and members, and how vLLM calls what the backend defines: no text of vLLM.
"""

from __future__ import annotations

import ast
import functools
import json
import sys
from pathlib import Path
from typing import Any

MLA = "model_executor/layers/attention/mla_attention.py"
BACKEND = "v1/attention/backend.py"
REGISTRY = "v1/attention/backends/registry.py"

METHODS = {
    MLA: {
        "MLACommonBackend": ("get_name", "get_builder_cls", "get_supported_head_sizes", "is_mla"),
        "MLACommonMetadataBuilder": ("__init__", "_build_decode", "build", "build_for_cudagraph_capture"),
        "MLACommonImpl": ("__init__", "forward_mqa"),
    },
    BACKEND: {
        "AttentionBackend": (
            "get_impl_cls", "get_supported_kernel_block_sizes", "supported_kv_cache_layouts", "supports_batch_invariance",
            "supports_combination", "supports_device_cpu_query_lens_mismatch", "supports_non_causal", "validate_configuration",
        ),
        "AttentionMetadataBuilder": ("get_cudagraph_support", "update_draft_decode_metadata", "_init_reorder_batch_threshold"),
        "AttentionImplBase": ("__new__",),
        "MLAAttentionImpl": ("do_kv_cache_update", "reserve_workspace"),
    },
    REGISTRY: {"AttentionBackendEnum": ("register", "get_path", "get_class")},
}  # fmt: skip
"""Methods that the backend overrides, calls or inherits on purpose: their parameters are compared."""
FIELDS = {
    MLA: ("MLACommonDecodeMetadata", "MLACommonMetadata", "QueryLenSupport"),
    BACKEND: ("AttentionCGSupport", "AttentionType"),
    "v1/kv_cache_layout.py": ("KVCacheLayout",),
}
"""Classes whose annotated fields and members are compared, in order."""
FLAGS = {
    MLA: {"MLACommonMetadataBuilder": ("query_len_support", "reorder_batch_threshold")},
    BACKEND: {
        "AttentionBackend": ("supported_dtypes", "supported_kv_cache_dtypes"),
        "AttentionMetadataBuilder": ("_cudagraph_support", "supports_draft_decode_metadata_update"),
        "AttentionImplBase": (
            "can_return_lse_for_decode", "lse_base_on_e", "need_to_return_lse_for_decode", "supports_dcp", "supports_pcp",
            "supports_quant_query_input",
        ),
        "AttentionLayer": ("_k_scale",),
        "CommonAttentionMetadata": (
            "query_start_loc", "query_start_loc_cpu", "seq_lens", "num_reqs", "num_actual_tokens", "max_query_len",
            "max_seq_len", "block_table_tensor", "slot_mapping", "causal",
        ),
    },
}  # fmt: skip
"""Class attributes that the backend or its tests set or read: they must exist."""
FUNCTIONS = {REGISTRY: ("register_backend",), "plugins/__init__.py": ("load_general_plugins",)}
CALLS = {MLA: ("forward_mqa", "do_kv_cache_update", "_build_decode", "impl_cls", "reserve_workspace")}
"""Calls of what the backend defines: positional arguments and keywords."""


def read_interface(root: Path) -> dict[str, Any]:
    """The facts, as plain data. `root`: the folder of the package `vllm`. What is missing there is None."""
    facts: dict[str, Any] = {"methods": {}, "fields": {}, "flags": {}, "functions": {}, "calls": {}}
    for file, classes in METHODS.items():
        for owner, names in classes.items():
            for name in names:
                found = _function(_class(root, file, owner), name)
                facts["methods"][f"{owner}.{name}"] = None if found is None else _parameters(found)
    for file, owners in FIELDS.items():
        for owner in owners:
            facts["fields"][owner] = _members(_class(root, file, owner))
    for file, flags in FLAGS.items():
        for owner, names in flags.items():
            members = _members(_class(root, file, owner))
            facts["flags"][owner] = [name for name in names if name in members]
    for file, names in FUNCTIONS.items():
        for name in names:
            found = _function(_tree(root, file), name)
            facts["functions"][name] = None if found is None else _parameters(found)
    for file, names in CALLS.items():
        for name in names:
            facts["calls"][name] = _calls(_tree(root, file), name)
    return facts


@functools.cache
def _tree(root: Path, file: str) -> ast.Module:
    path = root / file
    return ast.parse(path.read_text(encoding="utf-8") if path.exists() else "")


def _class(root: Path, file: str, name: str) -> ast.ClassDef | None:
    return next((n for n in _tree(root, file).body if isinstance(n, ast.ClassDef) and n.name == name), None)


def _function(owner: ast.ClassDef | ast.Module | None, name: str) -> ast.FunctionDef | None:
    body = [] if owner is None else owner.body
    return next((n for n in body if isinstance(n, ast.FunctionDef) and n.name == name), None)


def _parameters(function: ast.FunctionDef) -> list[str]:
    """Names in order; "=" after those with a default, "*" before those that collect the rest."""
    args = function.args
    named = [a.arg for a in (*args.posonlyargs, *args.args)]
    plain = len(named) - len(args.defaults)
    names = [name + ("=" if i >= plain else "") for i, name in enumerate(named)]
    names += [f"*{args.vararg.arg}"] if args.vararg else []
    names += [a.arg + ("" if d is None else "=") for a, d in zip(args.kwonlyargs, args.kw_defaults, strict=True)]
    return names + ([f"**{args.kwarg.arg}"] if args.kwarg else [])


def _members(owner: ast.ClassDef | None) -> list[str]:
    names: list[str] = []
    for node in [] if owner is None else owner.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.append(node.target.id)
        elif isinstance(node, ast.Assign):
            names += [t.id for t in node.targets if isinstance(t, ast.Name)]
    return names


def _calls(tree: ast.Module, name: str) -> list[list[str]]:
    """One entry per call: "#n" for n positional arguments, then the keywords; "**" for an unpacked mapping."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called == name:
                found.append([f"#{len(node.args)}", *(k.arg or "**" for k in node.keywords)])
    return sorted(found)


if __name__ == "__main__":
    print(json.dumps(read_interface(Path(sys.argv[1])), indent=1))
