"""Where an engine's attention sources cast a whole KV pool: read from the syntax tree, nothing is imported or run.

A pool is what a pool's getter returns (SGLang) or an attention function's cache argument (vLLM), through views, slices of
whole dimensions and local names. Casting it (`.to(dtype)`, `.float()`, `copy_` into another dtype ...) moves every page, live
or not, whenever the dtypes differ, that is, with an FP8 cache. Rows picked by an index first are a gather, bounded by what is
live, and are listed apart. A cast inside a kernel moves nothing and is no finding.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import msgspec

GETTERS = {"get_key_buffer", "get_value_buffer", "get_kv_buffer"}
CACHE_ARGUMENTS = {"kv_cache", "kv_c_cache", "k_cache", "kv_c_and_k_pe_cache", "key_cache", "value_cache"}
"""Names under which vLLM hands a layer's whole cache to a function."""
VIEWS = {
    "view", "reshape", "unsqueeze", "squeeze", "transpose", "permute", "flatten", "unflatten", "contiguous", "detach", "chunk",
    "split", "unbind", "movedim", "as_strided", "narrow",
}  # fmt: skip
VIEW_FUNCTIONS = {"paged_view", "paged_kv_view"}
CASTS = {"float", "half", "bfloat16", "double", "type"}
SOURCES = {"sglang": ("srt",), "vllm": ("v1/attention", "model_executor/layers/attention")}
"""Folders of attention sources, below the package."""


class Cast(msgspec.Struct, frozen=True):
    """One place. `kind`: "pool" (every page) or "rows" (gathered first). `code`: the expression, on one line."""

    file: str
    line: int
    function: str
    kind: str
    code: str


class Audit(msgspec.Struct, frozen=True):
    """What an audit read: `files` with a pool in them, and the casts found, by file and line."""

    files: int
    casts: tuple[Cast, ...]


def audit(engine: str, package: Path) -> Audit:
    """Audits the attention sources of `engine` ("sglang" or "vllm") in its package folder.

    Files that do not parse are left out, as Python would.
    """
    casts: list[Cast] = []
    files = 0
    for path in _sources(engine, package):
        text = path.read_text(encoding="utf-8", errors="replace")
        if not any(word in text for word in (GETTERS if engine == "sglang" else CACHE_ARGUMENTS)):
            continue
        try:
            tree = ast.parse(text)
        except (SyntaxError, ValueError):
            continue
        files += 1
        relative = path.relative_to(package.parent).as_posix()
        for name, function in _functions(tree):
            casts += (Cast(relative, *found) for found in _Reader(engine, name, function).read())
    return Audit(files, tuple(sorted(set(casts), key=lambda c: (c.kind, c.file, c.line))))


def _sources(engine: str, package: Path) -> Iterator[Path]:
    for folder in SOURCES[engine]:
        yield from sorted((package / folder).rglob("*.py"))


def _functions(tree: ast.Module) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """(qualified name, function) of every function, inner ones too."""
    stack: list[tuple[str, ast.AST]] = [("", tree)]
    while stack:
        prefix, node = stack.pop()
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                yield f"{prefix}{child.name}", child
                stack.append((f"{prefix}{child.name}.", child))
            elif isinstance(child, ast.ClassDef):
                stack.append((f"{prefix}{child.name}.", child))
            else:
                stack.append((prefix, child))


class _Reader:
    """The casts of one function; `pools` maps local names to "pool" or "rows"."""

    def __init__(self, engine: str, name: str, function: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        self.name, self.function = name, function
        self.pools: dict[str, str] = {}
        if engine == "vllm":
            arguments = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
            self.pools = {a.arg: "pool" for a in arguments if a.arg in CACHE_ARGUMENTS}

    def read(self) -> Iterator[tuple[int, str, str, str]]:
        """(line, function, kind, code), in the order of the lines."""
        for node in _in_order(self.function):
            if isinstance(node, ast.Call):
                kind = self._cast(node)
                if kind:
                    yield node.lineno, self.name, kind, " ".join(ast.unparse(node).split())
            elif isinstance(node, ast.Assign):
                for target in node.targets:
                    self._assign(target, node.value)
            elif isinstance(node, ast.AnnAssign) and node.value is not None:
                self._assign(node.target, node.value)

    def _assign(self, target: ast.expr, value: ast.expr) -> None:
        names = target.elts if isinstance(target, ast.Tuple | ast.List) else [target]
        values = (
            value.elts
            if isinstance(value, ast.Tuple | ast.List) and len(value.elts) == len(names)
            else [value] * len(names)
        )
        for name, part in zip(names, values, strict=True):
            if not isinstance(name, ast.Name):
                continue
            kind = self._kind(part)
            if kind:
                self.pools[name.id] = kind
            else:
                self.pools.pop(name.id, None)

    def _kind(self, node: ast.expr) -> str:
        """What an expression is: "pool", "rows" of one, or "" for anything else, the result of a cast included."""
        if isinstance(node, ast.Name):
            return self.pools.get(node.id, "")
        if isinstance(node, ast.IfExp):
            return self._kind(node.body) or self._kind(node.orelse)
        if isinstance(node, ast.Subscript):
            kind = self._kind(node.value)
            return kind if not kind or _is_whole(node.slice) else "rows"
        if not isinstance(node, ast.Call):
            return ""
        called = node.func
        if isinstance(called, ast.Attribute):
            if called.attr in GETTERS:
                return "pool"
            if called.attr == "index_select":
                return "rows" if self._kind(called.value) else ""
            return self._kind(called.value) if called.attr in VIEWS else ""
        if isinstance(called, ast.Name) and called.id in VIEW_FUNCTIONS and node.args:
            return self._kind(node.args[0])
        return ""

    def _cast(self, node: ast.Call) -> str:
        called = node.func
        if not isinstance(called, ast.Attribute):
            return ""
        if called.attr in CASTS or (called.attr == "to" and not _is_device(node)):
            return self._kind(called.value)
        if called.attr == "copy_" and node.args:
            return self._kind(node.args[0]) and ("" if self._kind(called.value) else self._kind(node.args[0]))
        return ""


def _in_order(function: ast.AST) -> list[ast.AST]:
    """Nodes of a function without its inner functions, by position; an assignment comes after the calls in its value."""
    found: list[ast.AST] = []
    stack = list(ast.iter_child_nodes(function))
    while stack:
        node = stack.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
            continue
        if isinstance(node, ast.Call | ast.Assign | ast.AnnAssign):
            found.append(node)
        stack += ast.iter_child_nodes(node)
    return sorted(found, key=lambda n: (n.lineno, not isinstance(n, ast.Call), n.col_offset))  # type: ignore[attr-defined]


def _is_whole(index: ast.expr) -> bool:
    """Whether an index keeps every page: slices, `...`, `None` and constants (of a tuple or of a leading dimension)."""
    parts = index.elts if isinstance(index, ast.Tuple) else [index]
    return all(isinstance(p, ast.Slice | ast.Constant | ast.UnaryOp) for p in parts)


def _is_device(node: ast.Call) -> bool:
    """Whether `.to(...)` names a device and no dtype."""
    if any(k.arg == "dtype" for k in node.keywords):
        return False
    if any(k.arg == "device" for k in node.keywords):
        return True
    text = " ".join(ast.unparse(a) for a in node.args)
    return not node.args or "device" in text or (isinstance(node.args[0], ast.Constant) and len(node.args) == 1)
