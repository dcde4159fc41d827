# SPDX-License-Identifier: Apache-2.0
"""`ikbo calibrate`: measures the constants of the cost model on this machine."""

from __future__ import annotations

import datetime
import platform
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from ikbo._autograd import below_autograd
from ikbo.transform.device_costs import DeviceCosts

# An element-wise operator and a product `[rows, width] x [width, width]` of a size that ranking
# models have: activations of some hundred candidates, which a CPU holds in its caches and a GPU
# does not.
_ROWS, _WIDTH = {"cpu": 1024, "cuda": 65536}, 512
_PRODUCT = {"cpu": (256, 512), "cuda": (8192, 2048)}
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_SMALL = 8
_CALLS = 20  # of a small operator, timed together
_KERNELS = 200
_VECTOR_BYTES = {"AVX512": 64, "AVX2": 32}


def calibrate(
    device: str = "cpu",
    *,
    progress: Callable[[str], None] | None = None,
    seconds: float = 0.3,
) -> DeviceCosts:
    """Measures what work costs on a device, with torch's present number of threads.

    Args:
        device: "cpu" or "cuda".
        progress: called with a line of text before each measurement.
        seconds: to spend on each of a dozen constants, at least.

    Errors:
        ValueError: another device, or no GPU.
    """
    if device not in ("cpu", "cuda") or (device == "cuda" and not torch.cuda.is_available()):
        found = "no GPU is found" if device == "cuda" else "it must be cpu or cuda"
        raise ValueError(f"ikbo.calibrate: device {device!r} cannot be measured: {found}")
    measured = _Measurement(device, seconds, progress or (lambda _: None))
    # As a transformed module runs its operators.
    with torch.no_grad(), below_autograd():
        return measured.costs()


class _Measurement:
    def __init__(self, device: str, seconds: float, progress: Callable[[str], None]) -> None:
        self.device, self.seconds, self.progress = device, seconds, progress
        self.rows = _ROWS[device]

    def costs(self) -> DeviceCosts:
        x, y = torch.rand(2, self.rows, _WIDTH, device=self.device)
        index = torch.arange(self.rows, dtype=torch.int32, device=self.device) // 64
        small = torch.rand(_SMALL, _SMALL, device=self.device)
        picks = torch.zeros(_SMALL, dtype=torch.int32, device=self.device)
        flops, own_flops = self._products()
        copied = self._of("element-wise traffic", lambda: torch.add(x, y))
        gathered = self._of("rows read by index", lambda: torch.ops.ikbo.expand(x, index))
        is_cpu = self.device == "cpu"
        linear = torch.ops.ikbo.linear.default
        return DeviceCosts(
            device=self.device,
            name=_cpu_model() if is_cpu else torch.cuda.get_device_name(),
            threads=torch.get_num_threads() if is_cpu else 1,
            torch=torch.__version__,
            flops_per_s=flops,
            own_flops_per_s=own_flops,
            bytes_per_s=3 * x.nbytes / copied,
            gather_bytes_per_s=x.nbytes / gathered,
            op_us=self._small("an operator", lambda: torch.add(small, small)),
            product_us=self._small("a product", lambda: torch.mm(small, small)),
            own_op_us=self._small(
                "an operator of ikbo", lambda: linear(small, small, small, small, None, picks)
            ),
            view_us=self._small("a view", lambda: small.transpose(0, 1)),
            package_product_us=self._packed_product(small),
            package_kernel_us=self._kernel(),
            vector_bytes=_vector_bytes() if is_cpu else 16,
            measured=datetime.date.today().isoformat(),
        )

    def _products(self) -> tuple[dict[str, float], dict[str, float]]:
        """FLOP/s of torch's products and of ikbo's, by element type."""
        found: tuple[dict[str, float], dict[str, float]] = ({}, {})
        rows, width = _PRODUCT[self.device]
        index = torch.zeros(rows, dtype=torch.int32, device=self.device)
        linear = torch.ops.ikbo.linear.default
        for dtype in _DTYPES:
            has_own = dtype != torch.float64 or self.device == "cpu"
            x = torch.rand(rows, width, device=self.device).to(dtype)
            w = torch.rand(width, width, device=self.device).to(dtype)
            name = str(dtype).removeprefix("torch.")
            work = 2.0 * rows * width**2
            found[0][name] = work / self._of(f"products in {name}", partial(torch.mm, x, w))
            if has_own:
                own = partial(linear, x[:1], x, w, w, None, index)
                found[1][name] = work / self._of(f"ikbo's products in {name}", own)
        return found

    def _of(self, what: str, call: Callable[[], object]) -> float:
        """Seconds of one call on large tensors."""
        self.progress(f"measuring {what}")
        return self._least(call, 10 if self.device == "cuda" else 1)

    def _small(self, what: str, call: Callable[[], object]) -> float:
        """Microseconds of one call on small tensors."""
        self.progress(f"measuring {what} on little data")
        return self._least(call, _CALLS) * 1e6

    def _packed_product(self, small: Tensor) -> float:
        """Microseconds of one product as compiled code calls it.

        On the CPU that is oneDNN's, on a packed weight; a package itself would take half a minute
        to compile.
        """
        what = "a product as in a package"
        if self.device == "cuda":
            return self._replayed(what, lambda: torch.mm(small, small))
        packed = torch.ops.mkldnn._reorder_linear_weight(small)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            products = torch.jit.script(_products)
        self.progress(f"measuring {what} on little data")
        return self._least(lambda: products(small, packed, _CALLS), 1) / _CALLS * 1e6

    def _kernel(self) -> float:
        """Microseconds of any other kernel of compiled code; on the CPU, of making its result."""
        what = "a kernel as in a package"
        if self.device == "cuda":
            x = torch.rand(_SMALL, device=self.device)
            return self._replayed(what, lambda: x.add_(1.0))
        return self._small(what, lambda: torch.empty(_SMALL, _SMALL))

    def _replayed(self, what: str, call: Callable[[], object]) -> float:
        """Microseconds of one call of many that a GPU starts by itself."""
        self.progress(f"measuring {what} on little data")
        call()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(_KERNELS):
                call()
        return self._least(graph.replay, 1) / _KERNELS * 1e6

    def _least(self, call: Callable[[], object], calls: int) -> float:
        """Seconds of one call, the least of many: what else the machine does only adds to it."""
        call()
        self._wait()
        best, end = float("inf"), time.perf_counter() + self.seconds
        while True:
            start = time.perf_counter()
            for _ in range(calls):
                call()
            self._wait()
            now = time.perf_counter()
            best = min(best, (now - start) / calls)
            if now > end:
                return best

    def _wait(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()


def _products(x: Tensor, packed: Tensor, count: int) -> Tensor:
    """Products in turn, without Python between them, which costs as much as a small one."""
    for _ in range(count):
        x = torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")
    return x


def _vector_bytes() -> int:
    return _VECTOR_BYTES.get(torch.backends.cpu.get_cpu_capability(), 16)


def _cpu_model() -> str:
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())
