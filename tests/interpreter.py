"""Triton's interpreter without work that it repeats or throws away. What kernels compute does not change.

As it comes it looks through all names of `triton.language` for each launch and for each function that is
called, `tl.sum` and `tl.zeros` among them; it adds integers twice to find an overflow, which only its debug
mode reports; and it lists all types of NumPy to find one. That was most of a small kernel's time.
"""

from dataclasses import replace
from types import SimpleNamespace


def speed_up():
    """The language stays exchanged: with TRITON_INTERPRET=1 nobody wants the compiler's."""
    import triton.language as tl
    from triton.runtime import interpreter

    interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    nothing = interpreter._LangPatchScope()
    interpreter._patch_lang = lambda function: nothing
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=False)
    find, found = interpreter._get_np_dtype, {}

    def find_once(dtype):
        scalar = dtype.scalar
        if scalar.name not in found:
            found[scalar.name] = find(scalar)
        return found[scalar.name]

    interpreter._get_np_dtype = find_once
