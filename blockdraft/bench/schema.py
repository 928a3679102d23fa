"""Checks a value that was read against a type: typed dictionaries, lists, plain values."""

from __future__ import annotations

from types import NoneType, UnionType
from typing import Literal, Union, get_args, get_origin, get_type_hints, is_typeddict

_MISSING = object()  # has no shape


def schema_error(value: object, shape: object, *, at: str = "") -> str | None:
    """Return where the value first departs from the shape; None where it fits. Further keys are fine."""
    origin, parts = get_origin(shape), get_args(shape)
    if origin in (Union, UnionType):
        return None if any(schema_error(value, part) is None for part in parts) else at
    if origin is Literal:
        return None if value in parts else at
    if isinstance(shape, type) and is_typeddict(shape) and isinstance(value, dict):
        fields = get_type_hints(shape).items()
        before = f"{at}." if at else ""
        inner = [(value.get(name, _MISSING), part, before + name) for name, part in fields]
    elif origin is list and isinstance(value, list):
        inner = [(entry, parts[0], f"{at}[{place}]") for place, entry in enumerate(value)]
    else:
        return None if _is_plain(value, origin or shape) else at
    errors = (schema_error(entry, part, at=where) for entry, part, where in inner)
    return next((error for error in errors if error is not None), None)


def _is_plain(value: object, kind: object) -> bool:
    if kind is NoneType or kind is None or is_typeddict(kind):
        return value is None and not is_typeddict(kind)
    if kind in (int, float):  # a bool is an int to Python, and no figure to us
        return isinstance(value, int | float if kind is float else int) and not isinstance(value, bool)
    return isinstance(kind, type) and isinstance(value, kind)
