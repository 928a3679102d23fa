"""Whether a value that was read has the shape that a type says: typed dictionaries, lists, plain values."""

from __future__ import annotations

from types import NoneType, UnionType
from typing import Literal, Union, get_args, get_origin, get_type_hints, is_typeddict


def misfit(value: object, shape: object, *, at: str = "") -> str | None:
    """Where the value first departs from the shape; None where it fits. Further keys are fine."""
    if is_typeddict(shape):
        return _misfit_of_fields(value, shape, at=at)
    origin, parts = get_origin(shape), get_args(shape)
    if origin is list:
        return _misfit_of_list(value, parts[0], at=at)
    if origin in (Union, UnionType):
        return None if any(misfit(value, part) is None for part in parts) else at
    if origin is Literal:
        return None if value in parts else at
    return None if _is_plain(value, origin or shape) else at


def _misfit_of_fields(value: object, shape: object, *, at: str) -> str | None:
    if not isinstance(value, dict):
        return at
    assert isinstance(shape, type)
    for name, part in get_type_hints(shape).items():
        where = f"{at}.{name}" if at else name
        if name not in value:
            return where
        found = misfit(value[name], part, at=where)
        if found is not None:
            return found
    return None


def _misfit_of_list(value: object, part: object, *, at: str) -> str | None:
    if not isinstance(value, list):
        return at
    places = (misfit(entry, part, at=f"{at}[{place}]") for place, entry in enumerate(value))
    return next((found for found in places if found is not None), None)


def _is_plain(value: object, kind: object) -> bool:
    if kind is NoneType or kind is None:
        return value is None
    if kind in (int, float):  # a bool is an int to Python, and no figure to us
        return isinstance(value, int | float if kind is float else int) and not isinstance(value, bool)
    return isinstance(kind, type) and isinstance(value, kind)
