"""Programmatic dependent launch (sm_90 and newer): a kernel's launch overlaps the end of the one before it.

A kernel launched with `launch_pdl=True` starts when every CTA of its predecessor has called `launch_dependents` or ended, and
must call `grid_dependency_wait` before it touches global memory: that returns once the predecessor has ended and its writes
are visible. Both return their argument, so that what depends on it comes after.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def grid_dependency_wait(x):
    return gl.inline_asm_elementwise(
        "griddepcontrol.wait; mov.b32 $0, $1;", "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def launch_dependents(x):
    return gl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; mov.b32 $0, $1;", "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1
    )
