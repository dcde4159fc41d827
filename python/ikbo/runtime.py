# SPDX-License-Identifier: Apache-2.0
"""Packages run in this process by the C++ runtime, through its C library.

    model = ikbo.runtime.Model("ranker.pt2")
    score = model(x_user=x_user, x_cand=x_cand)["score"]

Inputs are read where they lie and outputs are used where the run left them.
"""

from __future__ import annotations

import ctypes
import os
import threading
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ikbo import _c_api
from ikbo._dlpack import Elements, elements_of
from ikbo._load import ops_library_path

_ROLES = ("user", "candidate", "index")


@dataclass(frozen=True)
class TensorSpec:
    """An input or output. `shape[0]` is -1, the batch that `role` names; `values` is the range of
    an integer input whose elements the package relies on.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    role: str
    values: tuple[int, int] | None


class Model:
    """A package, loaded. Any number of threads may call it.

    Args:
        path: the `.pt2` file.
        num_sessions: runs that may be under way at once, at most 1024; further calls wait.
        threads_per_run: threads of PyTorch within a run, at most 1024, a setting of the whole
            process; 0 leaves it as it is.
        cuda_graphs: of a package for CUDA, record the runs of at most so many sizes as CUDA graphs,
            for each session, where that makes them faster; it takes a second or so.
        ops_library: path of `libikbo_ops.so`; None: the one that `import ikbo` loads.
        trusted_keys: PEM files of Ed25519 public keys, of which one must have signed the package.
        require_digests: refuse a package whose manifest lists no digests of its files.

    Errors:
        RuntimeError: the C library is not there; the package cannot be opened, is not trusted or
            does not fit this process.
    """

    name: str
    version: str
    device: str
    max_users: int
    max_candidates: int
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        num_sessions: int = 1,
        threads_per_run: int = 0,
        cuda_graphs: int = 0,
        ops_library: str | os.PathLike[str] | None = None,
        trusted_keys: Sequence[str | os.PathLike[str]] = (),
        require_digests: bool = False,
    ) -> None:
        if num_sessions < 1:
            raise ValueError(f"ikbo.runtime: num_sessions must be at least 1; got {num_sessions}")
        numbers = {
            "num_sessions": num_sessions,
            "threads_per_run": threads_per_run,
            "cuda_graphs": cuda_graphs,
        }
        for name, number in numbers.items():
            if ctypes.c_int32(number).value != number:  # ctypes would cut it off
                raise ValueError(f"ikbo.runtime: {name} must have at most 32 bits; got {number}")
        self._library = _c_api.load(_c_api.library_path())
        keys = [os.fsencode(key) for key in trusted_keys]
        trust = _c_api.PackageOptions(
            size=ctypes.sizeof(_c_api.PackageOptions),
            trusted_keys=(ctypes.c_char_p * len(keys))(*keys),
            num_trusted_keys=len(keys),
            require_digests=require_digests,
        )
        package = self._make("package", "ikbo_package_open", os.fsencode(path), trust)
        self._describe(self._library.ikbo_package_get_info(package).contents)
        options = _c_api.ModelOptions(
            size=ctypes.sizeof(_c_api.ModelOptions),
            ops_library=os.fsencode(ops_library or ops_library_path()),
            **numbers,
        )
        model = self._make("model", "ikbo_model_load", package, options)
        self._sessions = _Sessions()
        for _ in range(num_sessions):
            self._sessions.put(self._make("session", "ikbo_session_create", model))
        # The libraries' own threads end with the process: no run may be under way by then.
        weakref.finalize(self, self._sessions.close, num_sessions)

    def __call__(self, **arrays: Any) -> dict[str, Any]:
        """Runs one request.

        Args:
            arrays: one NumPy array or DLPack tensor in host memory per input, by its name (a nested
                input's, `features.age`, through `**{...}`), dense and row-major. With one user,
                `cand_to_user` may be left out.

        Returns:
            NumPy arrays by the outputs' names; torch tensors for bfloat16, which NumPy lacks.

        Errors:
            TypeError, ValueError: an input is missing, unknown, of another dtype or not dense.
            RuntimeError: the package refuses it: a shape, an index or a value out of range.
        """
        return self.run([arrays])[0]

    def run(self, requests: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Runs several requests as one, in which each has users of its own; as `__call__`, but that
        the inputs of several are copied side by side.
        """
        if os.getpid() != self._sessions.process:
            raise RuntimeError(
                f"model {self.name}: must be run by the process that loaded it, whose threads a "
                f"fork does not have, {self._sessions.process}; got {os.getpid()}; load it there"
            )
        elements = [self._elements(request) for request in requests]
        given = (_c_api.Request * len(requests))(*map(self._request, elements))
        session = self._sessions.take()
        try:
            result = self._make("result", "ikbo_session_run", session, given, len(requests))
        finally:
            self._sessions.put(session)
        return [self._outputs(result, i) for i in range(len(requests))]

    def _describe(self, info: _c_api.PackageInfo) -> None:
        self.name, self.version = info.model_name.decode(), info.model_version.decode()
        self.device = info.device.decode()
        self.max_users, self.max_candidates = info.max_users, info.max_candidates
        self.inputs = tuple(_spec(info.inputs[i]) for i in range(info.num_inputs))
        self.outputs = tuple(_spec(info.outputs[i]) for i in range(info.num_outputs))

    def _make(self, kind: str, function: str, *arguments: Any) -> Any:
        """The handle that a C function makes; freed when nothing refers to it any more, but not at
        the end of the process: threads and exit handlers may still use it.
        """
        handle = ctypes.c_void_p()
        error = getattr(self._library, function)(*arguments, ctypes.byref(handle))
        if error:
            text = self._library.ikbo_error_message(error).decode(errors="replace")
            self._library.ikbo_error_free(error)
            raise RuntimeError(text)
        free = getattr(self._library, f"ikbo_{kind}_free")
        weakref.finalize(handle, free, handle.value).atexit = False
        return handle

    def _elements(self, arrays: Mapping[str, Any]) -> list[Elements | None]:
        """In the package's order; None for the index that was left out."""
        unknown = set(arrays) - {spec.name for spec in self.inputs}
        missing = [s.name for s in self.inputs if s.name not in arrays and s.role != "index"]
        if unknown or missing:
            raise TypeError(
                f"model {self.name}: inputs must be {[spec.name for spec in self.inputs]}; missing "
                f"{missing}, unknown {sorted(unknown)}"
            )
        found = [
            elements_of(spec.name, arrays[spec.name]) if spec.name in arrays else None
            for spec in self.inputs
        ]
        for spec, elements in zip(self.inputs, found, strict=True):
            if elements is not None and not elements.shape:
                raise ValueError(
                    f"model {self.name}: input {spec.name} must have shape {list(spec.shape)}; "
                    "got a scalar"
                )
        return found

    def _request(self, elements: Sequence[Elements | None]) -> _c_api.Request:
        rows = {"user": 0, "candidate": 0}
        for spec, found in zip(self.inputs, elements, strict=True):
            if found is not None and spec.role in rows:
                rows[spec.role] = found.shape[0]
        tensors = (_c_api.Tensor * len(elements))(*map(_tensor, elements))
        return _c_api.Request(rows["user"], rows["candidate"], tensors, len(tensors))

    def _outputs(self, result: ctypes.c_void_p, request: int) -> dict[str, Any]:
        tensors = self._library.ikbo_result_get_outputs(result, request)
        return {spec.name: _array(tensors[i], result) for i, spec in enumerate(self.outputs)}


class _Sessions:
    """What threads that run take and put back; who finds none waits."""

    def __init__(self) -> None:
        self.process = os.getpid()  # of no use to another one
        self._free: list[ctypes.c_void_p] = []
        self._changed = threading.Condition()
        self._is_closed = False

    def put(self, session: ctypes.c_void_p) -> None:
        with self._changed:
            self._free.append(session)
            self._changed.notify_all()

    def take(self) -> ctypes.c_void_p:
        with self._changed:
            self._changed.wait_for(lambda: self._free and not self._is_closed)
            return self._free.pop()

    def close(self, count: int) -> None:
        """Waits for the runs under way, until `count` are here, and keeps them."""
        if os.getpid() != self.process:
            return  # nobody runs here, nor lets go of the lock
        with self._changed:
            self._is_closed = True
            self._changed.wait_for(lambda: len(self._free) == count)


def _spec(spec: _c_api.TensorSpec) -> TensorSpec:
    return TensorSpec(
        spec.name.decode(),
        _c_api.DTYPE_NAMES[spec.dtype],
        tuple(spec.shape[i] for i in range(spec.rank)),
        _ROLES[spec.role],
        (spec.min, spec.max) if spec.has_range else None,
    )


def _tensor(elements: Elements | None) -> _c_api.Tensor:
    if elements is None:
        return _c_api.Tensor()
    shape = (ctypes.c_int64 * len(elements.shape))(*elements.shape)
    dtype = _c_api.DTYPE_NAMES.index(elements.dtype)
    return _c_api.Tensor(elements.address, elements.num_bytes, shape, len(elements.shape), dtype)


def _array(tensor: _c_api.Tensor, result: ctypes.c_void_p) -> Any:
    """The elements of an output where they lie; the array keeps the result alive."""
    shape = tuple(tensor.shape[i] for i in range(tensor.rank))
    name = _c_api.DTYPE_NAMES[tensor.dtype]
    if tensor.bytes:
        memory = (ctypes.c_char * tensor.bytes).from_address(tensor.data)
        memory.result = result
    else:
        memory = b""
    stored = np.frombuffer(memory, dtype="uint16" if name == "bfloat16" else name).reshape(shape)
    if name != "bfloat16":
        return stored
    import torch

    return torch.from_numpy(stored).view(torch.bfloat16)
