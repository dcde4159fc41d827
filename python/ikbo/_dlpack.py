# SPDX-License-Identifier: Apache-2.0
"""Where the elements of an array lie: NumPy arrays and whatever speaks DLPack, without copies.

NumPy's own `from_dlpack` has no bfloat16, hence the few structs of the protocol here.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, Structure, c_int32, c_int64, c_uint8, c_uint16, c_uint64, c_void_p
from dataclasses import dataclass
from typing import Any

import numpy as np

_CPU_DEVICES = (1, 3)  # kDLCPU, kDLCUDAHost
_DTYPES = {
    (0, 8): "int8",
    (0, 16): "int16",
    (0, 32): "int32",
    (0, 64): "int64",
    (1, 8): "uint8",
    (2, 16): "float16",
    (2, 32): "float32",
    (2, 64): "float64",
    (4, 16): "bfloat16",
    (6, 8): "bool",
}


class _DLTensor(Structure):
    _fields_ = (
        ("data", c_void_p),
        ("device_type", c_int32),
        ("device_id", c_int32),
        ("ndim", c_int32),
        ("code", c_uint8),
        ("bits", c_uint8),
        ("lanes", c_uint16),
        ("shape", POINTER(c_int64)),
        ("strides", POINTER(c_int64)),
        ("byte_offset", c_uint64),
    )


@dataclass(frozen=True)
class Elements:
    """A dense row-major tensor in host memory; `owner` keeps it alive."""

    address: int
    dtype: str
    shape: tuple[int, ...]
    num_bytes: int
    owner: Any


def elements_of(name: str, value: Any) -> Elements:
    """Where the elements of `value` lie; nothing is copied.

    Errors:
        TypeError: it is neither a NumPy array nor has `__dlpack__`, or has a dtype that no package
            has.
        ValueError: it is not dense and row-major, or not in host memory.
    """
    if isinstance(value, np.ndarray):
        return _of_numpy(name, value)
    if hasattr(value, "__dlpack__"):
        return _of_dlpack(name, value)
    raise TypeError(
        f"input {name} must be a NumPy array or have __dlpack__ (a torch.Tensor, say); got "
        f"{type(value).__name__}"
    )


def _of_numpy(name: str, array: np.ndarray) -> Elements:
    if array.dtype.name not in _DTYPES.values() or not array.dtype.isnative:
        raise TypeError(f"input {name} must have a dtype of the package; got {array.dtype!r}")
    if not array.flags.c_contiguous:
        raise ValueError(
            f"input {name} must be dense and row-major; got strides {array.strides} with shape "
            f"{array.shape}: numpy.ascontiguousarray makes a copy that is"
        )
    return Elements(array.ctypes.data, array.dtype.name, array.shape, array.nbytes, array)


def _of_dlpack(name: str, value: Any) -> Elements:
    device = value.__dlpack_device__()[0]
    if device not in _CPU_DEVICES:
        raise ValueError(f"input {name} must be in host memory; got DLPack device type {device}")
    capsule = value.__dlpack__()
    get_pointer = ctypes.pythonapi.PyCapsule_GetPointer
    get_pointer.restype, get_pointer.argtypes = c_void_p, (ctypes.py_object, ctypes.c_char_p)
    # The capsule is not marked as used: it frees what it holds when it goes, and it is kept.
    tensor = _DLTensor.from_address(get_pointer(capsule, b"dltensor"))
    dtype = _DTYPES.get((tensor.code, tensor.bits)) if tensor.lanes == 1 else None
    if dtype is None:
        raise TypeError(
            f"input {name} must have a dtype of the package; got DLPack type code {tensor.code} "
            f"with {tensor.bits} bits and {tensor.lanes} lanes"
        )
    shape = tuple(tensor.shape[i] for i in range(tensor.ndim))
    dense, expected = 1, []
    for size in reversed(shape):
        expected.append(dense)
        dense *= size
    if tensor.strides and dense > 0:
        strides = tuple(tensor.strides[i] for i in range(tensor.ndim))
        wrong = [
            axis
            for axis, stride in enumerate(reversed(expected))
            if shape[axis] > 1 and strides[axis] != stride
        ]
        if wrong:
            raise ValueError(
                f"input {name} must be dense and row-major; got strides {strides} with shape "
                f"{shape}: .contiguous() makes a copy that is"
            )
    address = (tensor.data or 0) + tensor.byte_offset
    return Elements(address, dtype, shape, dense * tensor.bits // 8, (value, capsule))
