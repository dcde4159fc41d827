# SPDX-License-Identifier: Apache-2.0
"""The command line's share of the cost model: `ikbo calibrate`, --ratio and --device-costs."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any


def add_cost_options(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--ratio",
        metavar="N[:M]",
        help="candidates per user that runs will have: what costs more than it saves over this "
        "range is not split (default: 10 to the largest number of candidates)",
    )
    command.add_argument(
        "--device-costs",
        metavar="FILE.json",
        help="what `ikbo calibrate` wrote (default: what ikbo ships for the kind of device)",
    )


def add_calibrate(commands: Any, run: Callable[[argparse.Namespace], None]) -> None:
    text = "measure what work costs on this machine, for --device-costs"
    command = commands.add_parser(
        "calibrate", help=text, description=f"{text[0].upper()}{text[1:]}. Takes some seconds."
    )
    command.set_defaults(run=run)
    command.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="default: cpu")
    command.add_argument(
        "--threads", type=int, metavar="N", help="of PyTorch on the CPU (default: its own choice)"
    )
    command.add_argument(
        "--seconds",
        type=float,
        default=0.3,
        metavar="S",
        help="for each of some fifteen measurements (default: 0.3); more on a busy machine",
    )
    command.add_argument(
        "-o", "--output", metavar="FILE.json", help="write there instead of printing"
    )
    command.add_argument(
        "--traceback", action="store_true", help="print the Python traceback of an error"
    )


def ratio_of(text: str | None) -> float | tuple[float, float] | None:
    """The value of --ratio: "70" or "10:500".

    Errors:
        ValueError: it is neither.
    """
    if text is None:
        return None
    low, separator, high = text.partition(":")
    try:
        return (float(low), float(high)) if separator else float(low)
    except ValueError:
        raise ValueError(f"--ratio must be a number or two, as 10:500; got {text!r}") from None


def run_calibrate(options: argparse.Namespace, progress: Callable[[str], None]) -> None:
    """Measures, and writes or prints the constants."""
    import torch

    from ikbo.calibrate import calibrate

    if options.threads is not None:
        if options.threads < 1:
            raise ValueError(f"--threads must be at least 1; got {options.threads}")
        torch.set_num_threads(options.threads)
    text = calibrate(options.device, progress=progress, seconds=options.seconds).to_json()
    progress("done")
    if options.output:
        Path(options.output).write_text(text + "\n")
    else:
        print(text)
