"""`native` pinned to one of its kernels, under registered names, so that tests reach both on one GPU."""

from __future__ import annotations

from uncast.attention import registry
from uncast.backends.native import NativeBackend


class PortableOnly(NativeBackend):
    name = "native_mma"

    def __init__(self) -> None:
        super().__init__("mma")


registry.register("native_mma", "tests.backends.native_kinds:PortableOnly")
