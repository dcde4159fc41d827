# SPDX-License-Identifier: Apache-2.0
"""`ikbo/ikbo.h` for ctypes: structs and functions under their own names; no logic."""

from __future__ import annotations

import ctypes
import os
from ctypes import POINTER, Structure, c_char_p, c_int32, c_int64, c_size_t, c_void_p
from pathlib import Path

ABI_VERSION = 1
USER, CANDIDATE, INDEX = 0, 1, 2
# By their number in `ikbo_dtype`.
DTYPE_NAMES = (
    *("bool", "uint8", "int8", "int16", "int32", "int64"),
    *("float16", "bfloat16", "float32", "float64"),
)

_NAME = "libikbo.so"
_BUILD_PRESETS = ("sm90", "cpu")


class TensorSpec(Structure):
    _fields_ = (
        ("name", c_char_p),
        ("shape", POINTER(c_int64)),
        ("rank", c_int32),
        ("dtype", c_int32),
        ("role", c_int32),
        ("has_range", c_int32),
        ("min", c_int64),
        ("max", c_int64),
    )


class PackageInfo(Structure):
    _fields_ = (
        ("model_name", c_char_p),
        ("model_version", c_char_p),
        ("torch_version", c_char_p),
        ("device", c_char_p),
        ("max_users", c_int64),
        ("max_candidates", c_int64),
        ("num_inputs", c_size_t),
        ("inputs", POINTER(TensorSpec)),
        ("num_outputs", c_size_t),
        ("outputs", POINTER(TensorSpec)),
        ("has_digests", c_int32),
    )


class PackageOptions(Structure):
    _fields_ = (
        ("size", c_size_t),
        ("trusted_keys", POINTER(c_char_p)),
        ("num_trusted_keys", c_size_t),
        ("require_digests", c_int32),
    )


class ModelOptions(Structure):
    _fields_ = (
        ("size", c_size_t),
        ("ops_library", c_char_p),
        ("num_sessions", c_int32),
        ("threads_per_run", c_int32),
        ("cuda_graphs", c_int32),
    )


class Tensor(Structure):
    _fields_ = (
        ("data", c_void_p),
        ("bytes", c_size_t),
        ("shape", POINTER(c_int64)),
        ("rank", c_int32),
        ("dtype", c_int32),
    )


class Request(Structure):
    _fields_ = (
        ("num_users", c_int64),
        ("num_candidates", c_int64),
        ("inputs", POINTER(Tensor)),
        ("num_inputs", c_size_t),
    )


_FUNCTIONS = {
    "ikbo_version": (c_char_p, ()),
    "ikbo_abi_version": (c_int32, ()),
    "ikbo_error_message": (c_char_p, (c_void_p,)),
    "ikbo_error_free": (None, (c_void_p,)),
    "ikbo_package_open": (c_void_p, (c_char_p, POINTER(PackageOptions), POINTER(c_void_p))),
    "ikbo_package_get_info": (POINTER(PackageInfo), (c_void_p,)),
    "ikbo_package_free": (None, (c_void_p,)),
    "ikbo_model_load": (c_void_p, (c_void_p, POINTER(ModelOptions), POINTER(c_void_p))),
    "ikbo_model_free": (None, (c_void_p,)),
    "ikbo_session_create": (c_void_p, (c_void_p, POINTER(c_void_p))),
    "ikbo_session_free": (None, (c_void_p,)),
    "ikbo_session_run": (c_void_p, (c_void_p, POINTER(Request), c_size_t, POINTER(c_void_p))),
    "ikbo_result_get_outputs": (POINTER(Tensor), (c_void_p, c_size_t)),
    "ikbo_result_free": (None, (c_void_p,)),
}


def library_path() -> Path:
    """Path of libikbo.so.

    The environment variable ``IKBO_C_LIBRARY`` if it is set, else the one built in this checkout
    (``build/sm90``, then ``build/cpu``).

    Errors:
        RuntimeError: no such file; the text lists the paths tried.
    """
    configured = os.environ.get("IKBO_C_LIBRARY")
    repository = Path(__file__).resolve().parent.parent.parent
    built = [repository / "build" / preset / "lib" / _NAME for preset in _BUILD_PRESETS]
    candidates = [Path(configured)] if configured else built
    for path in candidates:
        if path.is_file():
            return path
    tried = ", ".join(str(path) for path in candidates)
    raise RuntimeError(
        f"ikbo.runtime: the C library {_NAME} must exist; tried {tried}; install it with "
        "`cmake --install` (it is no part of the wheel) and set IKBO_C_LIBRARY to its path"
    )


def load(path: Path) -> ctypes.CDLL:
    """The library with the types of its functions.

    Errors:
        RuntimeError: it cannot be loaded, or is of another ABI version.
    """
    try:
        library = ctypes.CDLL(str(path))
        version = library.ikbo_abi_version()
    except (OSError, AttributeError) as error:
        raise RuntimeError(f"ikbo.runtime: {path} cannot be loaded: {error}") from error
    if version != ABI_VERSION:
        raise RuntimeError(
            f"ikbo.runtime: {path} must have ABI version {ABI_VERSION}; got {version}: install "
            "the runtime of this version of ikbo"
        )
    for name, (result, arguments) in _FUNCTIONS.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library
