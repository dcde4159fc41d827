# SPDX-License-Identifier: Apache-2.0
"""What work costs on a device: the constants of the cost model.

`ikbo calibrate` measures them; `devices/` holds those that ikbo ships, one file for each kind of
device.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

SHIPPED = Path(__file__).parent / "devices"
_RATES = ("flops_per_s", "own_flops_per_s")
_TEXTS = ("device", "name", "torch", "measured")


@dataclass(frozen=True)
class DeviceCosts:
    """Constants of one device.

    Attributes:
        device: "cpu" or "cuda", as torch calls it.
        name: the device's model.
        threads: of PyTorch, when it was measured; 1 on a GPU.
        torch: the version that was measured.
        flops_per_s: of a large product, by element type; one that is missing counts as float32.
        own_flops_per_s: the same of ikbo's own kernels.
        bytes_per_s: read and written by an element-wise operator.
        gather_bytes_per_s: written by `index_select` of rows.
        op_us: of one eager operator whatever its size, in microseconds.
        product_us: of one eager product.
        own_op_us: of one eager operator of ikbo; `expand` counts as any operator.
        view_us: of one eager view.
        package_product_us: of one product inside a package.
        package_kernel_us: of any other kernel inside a package.
        vector_bytes: products are computed in pieces of this size along rows and columns.
        measured: the date.
    """

    device: str
    name: str
    threads: int
    torch: str
    flops_per_s: Mapping[str, float]
    own_flops_per_s: Mapping[str, float]
    bytes_per_s: float
    gather_bytes_per_s: float
    op_us: float
    product_us: float
    own_op_us: float
    view_us: float
    package_product_us: float
    package_kernel_us: float
    vector_bytes: int
    measured: str

    def to_json(self) -> str:
        """The constants as JSON text, which `parse` reads."""
        return json.dumps(_rounded(asdict(self)), indent=1)

    @classmethod
    def parse(cls, text: str, source: str = "its text") -> DeviceCosts:
        """Reads what `to_json` wrote.

        Errors:
            ValueError: a field is missing, unknown, of another type, or no positive number;
                `source` is what the text names as its place.
        """
        try:
            document = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"ikbo.DeviceCosts: {source} must be JSON: {error}") from error
        names = {f.name for f in fields(cls)}
        if not isinstance(document, dict) or set(document) != names:
            found = sorted(document) if isinstance(document, dict) else type(document).__name__
            raise ValueError(
                f"ikbo.DeviceCosts: {source} must have the fields {sorted(names)}, as "
                f"`ikbo calibrate` writes them; got {found}"
            )
        for name, value in document.items():
            if name in _RATES:
                if not isinstance(value, dict) or "float32" not in value:
                    raise ValueError(
                        f"ikbo.DeviceCosts: {name} of {source} must have float32; got {value!r}"
                    )
                for dtype, rate in value.items():
                    _check_positive(f"{name}.{dtype}", rate, source)
            elif name in _TEXTS:
                if not isinstance(value, str):
                    raise ValueError(
                        f"ikbo.DeviceCosts: {name} of {source} must be a text; got {value!r}"
                    )
            else:
                _check_positive(name, value, source)
        return cls(**document)


# On which nothing costs anything: every split is made.
FREE = DeviceCosts(
    device="any",
    name="a device on which nothing costs anything",
    threads=1,
    torch="any",
    flops_per_s={"float32": math.inf},
    own_flops_per_s={"float32": math.inf},
    bytes_per_s=math.inf,
    gather_bytes_per_s=math.inf,
    op_us=0,
    product_us=0,
    own_op_us=0,
    view_us=0,
    package_product_us=0,
    package_kernel_us=0,
    vector_bytes=1,
    measured="never",
)


def _rounded(value: Any) -> Any:
    """Floats to four significant digits: no measurement is better than that."""
    if isinstance(value, Mapping):
        return {key: _rounded(item) for key, item in value.items()}
    return float(f"{value:.4g}") if isinstance(value, float) else value


def _check_positive(name: str, value: Any, source: str) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 < value < math.inf:
        raise ValueError(
            f"ikbo.DeviceCosts: {name} of {source} must be a positive number; got {value!r}"
        )


def device_costs(costs: DeviceCosts | str | os.PathLike[str] | None, device: str) -> DeviceCosts:
    """The constants to use on a kind of device.

    Args:
        costs: the constants, or the file that `ikbo calibrate` wrote; None for those shipped, or
            `FREE` where none are.
        device: "cpu", "cuda" or another.

    Errors:
        TypeError, ValueError: no such constants, or those of another kind of device.
        OSError: the file cannot be read.
    """
    if costs is None:
        shipped = SHIPPED / f"{device}.json"
        return DeviceCosts.parse(shipped.read_text(), str(shipped)) if shipped.exists() else FREE
    if isinstance(costs, str | os.PathLike):
        costs = DeviceCosts.parse(Path(costs).read_text(), os.fspath(costs))
    if not isinstance(costs, DeviceCosts):
        raise TypeError(
            "ikbo.transform: device_costs must be DeviceCosts, the path of a file that "
            f"`ikbo calibrate` wrote, or None; got {type(costs).__name__}"
        )
    if costs.device not in ("any", device):
        raise ValueError(
            f"ikbo.transform: device_costs must be of the model's device, {device}; got those of "
            f"{costs.device} ({costs.name})"
        )
    return costs
