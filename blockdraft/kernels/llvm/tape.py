"""StepTape: records a step on the CPU once and replays it without Python between its kernels.

A StepTape has the rules of a CUDA graph: the step's inputs and outputs keep their addresses, and the recorded
operations must not depend on values that the host reads. While a tape records,
  - kernels of `jit` are run and recorded with their jobs; consecutive kernels are replayed by one call of
    native code on all threads, which wait for each other after each kernel;
  - PyTorch operations are run and recorded with their arguments; views need no replay, as they share memory;
  - new memory comes from an Arena, which reuses the memory of tensors that no longer exist;
  - functions passed to `repeat` are run, and run again by Python at every replay; they may read values on the
    host.
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C import _get_dispatch_stack_at, _len_torch_dispatch_stack
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _pop_mode, _push_mode
from torch.utils._pytree import tree_flatten

from blockdraft.kernels.llvm.copies import lowered
from blockdraft.kernels.llvm.jit import NotRecordable, recorder, run_together
from blockdraft.kernels.llvm.pool import Call, table

_aten = torch.ops.aten
_EMPTY = (_aten.empty.memory_format, _aten.new_empty.default, _aten.empty_like.default)
# Operations that read values on the host, or whose output size depends on values.
_READING_TAGS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
_READING_METHODS = ("tolist", "numpy", "__array__")  # methods of Tensor that bypass the dispatcher
# Operations that are views if the tensor is contiguous.
_RESHAPING: dict[Any, Callable[..., Tensor]] = {
    _aten.reshape.default: Tensor.view,
    _aten.contiguous.default: lambda x: x,
}
_CONSTANT = (
    _aten.arange.start_step, _aten.arange.start, _aten.arange.default, _aten.new_full.default,
    _aten.full.default, _aten.scalar_tensor.default,
)  # fmt: skip
_ALIGN = 64
_CHUNK = 8 << 20  # bytes; a larger tensor gets a larger chunk


def end_recording() -> None:
    """Stop recording in this thread; do nothing if no tape records."""
    while (depth := _len_torch_dispatch_stack()) and isinstance(_get_dispatch_stack_at(depth - 1), StepTape):
        _pop_mode()
    recorder.tape = None


class _Chunk(NamedTuple):
    memory: Tensor
    addresses: range
    used: list[tuple[int, int, StorageWeakRef]]  # in order


class Arena:
    """Memory for the tensors of recorded steps; as steps run one at a time, they share an arena."""

    def __init__(self) -> None:
        self._chunks: list[_Chunk] = []

    def clear(self) -> None:
        """Free all memory, for another step."""
        for chunk in self._chunks:
            chunk.used.clear()

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        numel = math.prod(shape)
        size = max(_ALIGN, -(-numel * dtype.itemsize // _ALIGN) * _ALIGN)
        chunk, index, begin = self._gap(size)
        memory = (ctypes.c_char * size).from_address(chunk.memory.data_ptr() + begin)
        tensor = torch.frombuffer(memory, dtype=dtype, count=max(1, numel))[:numel].view(tuple(shape))
        storage = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
        chunk.used.insert(index, (begin, begin + size, storage))
        return tensor

    def _gap(self, size: int) -> tuple[_Chunk, int, int]:
        """Find `size` free bytes; return their chunk, index among its used parts, and first byte."""
        for chunk in self._chunks:
            chunk.used[:] = [one for one in chunk.used if not one[2].expired()]  # type: ignore[no-untyped-call]
            end = 0
            for index, (begin, after, _) in enumerate([*chunk.used, (chunk.memory.nbytes, 0, None)]):
                if begin - end >= size:
                    return chunk, index, end
                end = after
        new = torch.empty(max(_CHUNK, size), dtype=torch.uint8)
        self._chunks.append(_Chunk(new, range(new.data_ptr(), new.data_ptr() + new.nbytes), []))
        return self._chunks[-1], 0, 0

    def __contains__(self, tensor: Tensor) -> bool:
        address = tensor.data_ptr()
        return any(address in chunk.addresses for chunk in self._chunks)

    @property
    def num_bytes(self) -> int:
        return sum(chunk.memory.nbytes for chunk in self._chunks)


@functools.cache
def _watch_tensors() -> None:
    """Make methods that read values without the dispatcher raise NotRecordable while a tape records.

    A TorchFunctionMode would see such methods, too, but would take a fifth of the recording's time.
    """
    for name in _READING_METHODS:
        setattr(Tensor, name, _watched(name, getattr(Tensor, name)))


def _watched(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def watched(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        if recorder.tape is not None:
            raise NotRecordable(f"{name} reads values on the host")
        return method(tensor, *args, **kwargs)

    return watched


class StepTape(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records what runs in its `with` block; if it `goes_on`, it may use tensors of the tape before it."""

    def __init__(self, arena: Arena, *, goes_on: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._arena = arena
        self._goes_on = goes_on
        self._calls: list[Call] = []
        self._parts: list[Callable[[], None]] = []
        self._constants: dict[int, Callable[[], None]] = {}  # by storage
        self._held: list[object] = []  # keeps jobs and memory outside the arena alive

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: otherwise PyTorch imports torch.compile, which takes seconds and is not used here."""
        return False

    def __enter__(self) -> StepTape:
        assert recorder.tape is None, "one tape at a time"
        if not self._goes_on:
            self._arena.clear()
        _watch_tensors()
        recorder.tape = self
        _push_mode(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        end_recording()
        if kind is None:
            self._end_calls()

    @torch.inference_mode()
    def replay(self) -> None:
        for part in self._parts:
            part()

    def __len__(self) -> int:
        """Return the number of parts that Python runs at a replay."""
        return len(self._parts)

    def add(self, call: Call, used: Iterable[Tensor]) -> None:
        self._held += [one for one in used if one not in self._arena]
        self._calls.append(call)

    def add_python(self, run: Callable[[], None]) -> None:
        self._end_calls()
        self._parts.append(run)
        recorder.tape = None
        try:
            with torch.utils._python_dispatch._disable_current_modes():
                run()
        finally:
            recorder.tape = self

    def _end_calls(self) -> None:
        if self._calls:
            addresses = table(self._calls)
            self._parts.append(lambda: run_together(addresses, torch.get_num_threads()))
            self._held += self._calls
            self._calls = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is _aten.detach_.default:
            return args[0]
        if func in _EMPTY and (layout := _contiguous(func, args, kwargs)) is not None:
            return self._arena.empty(*layout)
        if func in _RESHAPING and not kwargs and args[0].is_contiguous():
            return _RESHAPING[func](*args)
        if _is_composite(func):  # inference mode does not decompose them: `reshape`, `item`
            _push_mode(self)
            try:
                return func.decompose(*args, **kwargs)
            finally:
                _pop_mode()
        if _READING_TAGS & set(func.tags) and not _takes_rows(func, args):
            raise NotRecordable(f"{func} reads values on the host")
        if func._schema.is_mutable:
            self._refill((args, kwargs))
        copied = lowered(func, args, kwargs, self._arena.empty)
        if copied is not None:
            return copied
        result = func(*args, **kwargs)
        if func in _CONSTANT:
            again = functools.partial(_again, func, args, kwargs, result)  # holds the result
            self._constants[result.untyped_storage()._cdata] = again
        elif func._schema.is_mutable:
            self._note(functools.partial(func, *args, **kwargs))
        elif not _shares_memory(result, (args, kwargs)):
            self._note(functools.partial(_again, func, args, kwargs, result))
        return result

    def _refill(self, changed: Any) -> None:
        """Recreate constants at the start of each replay if this operation may change them."""
        for one in _tensors(changed):
            again = self._constants.pop(one.untyped_storage()._cdata, None)
            if again is not None:
                self._parts.insert(0, again)

    def _note(self, run: Callable[[], Any]) -> None:
        self._end_calls()
        self._parts.append(run)


@functools.cache
def _is_composite(func: Any) -> bool:
    """Return True if the operation consists only of other operations."""
    has_kernel = functools.partial(torch._C._dispatch_has_kernel_for_dispatch_key, func.name())
    return has_kernel("CompositeImplicitAutograd") and not has_kernel("CPU")


def _contiguous(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Sequence[int], torch.dtype] | None:
    """Return shape and dtype of the requested tensor; None if it would not be contiguous."""
    if kwargs.get("memory_format") not in (None, torch.contiguous_format, torch.preserve_format):
        return None
    if func is _aten.empty.memory_format:
        return args[0], kwargs.get("dtype") or torch.get_default_dtype()
    dtype = kwargs.get("dtype") or args[0].dtype
    if func is _aten.new_empty.default:
        return args[1], dtype
    return (args[0].shape, dtype) if args[0].is_contiguous() else None


def _takes_rows(func: Any, args: tuple[Any, ...]) -> bool:
    """Return True for an index by integers; with booleans, the result's size would depend on values."""
    return func is _aten.index.Tensor and all(
        one is None or one.dtype not in (torch.bool, torch.uint8) for one in args[1]
    )


def _again(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
    """Repeat an operation; copy its results to the memory of the first results."""
    again = func(*args, **kwargs)
    for old, new in zip(_tensors(result), _tensors(again), strict=True):
        old.copy_(new)


def _shares_memory(result: Any, given: Any) -> bool:
    """Return True if a result shares memory with an argument."""
    storages = {one.untyped_storage()._cdata for one in _tensors(given)}
    return any(one.untyped_storage()._cdata in storages for one in _tensors(result))


def _tensors(tree: Any) -> list[Tensor]:
    return [one for one in tree_flatten(tree)[0] if isinstance(one, Tensor)]
