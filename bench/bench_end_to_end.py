# SPDX-License-Identifier: Apache-2.0
"""Times five ranking nets end to end against their replicated and their hand-split forms.

usage: python -m bench.bench_end_to_end [--device cuda] [--nets a,b] [--ratios 10,70] [--keep]

Nets and sizes: examples/nets, the full sizes in fp16 on a GPU, small ones in fp32 on the CPU. Cases
name a net and the candidates of each user (ratio). All take users once, with one index:

ours                   the unmodified net by `ikbo.transform`, as an AOTInductor package
ours_adopted           the net written with `ikbo.nn`, as such a package
replicated_aoti        the unmodified net, its user inputs repeated inside the graph, such a package
replicated_compile     the same by `torch.compile`
net_split_aoti         split by hand: user side once, its results repeated; such a package
public_pieces_compile  decomposed by hand into PyTorch's operators, by `torch.compile`; late_ranking

All have the same weights, ranges and Inductor options, and take turns in one process. On the CPU
each package is loaded several times, since where weights lie decides some per cent; on a GPU they
run with a cold L2, and once more as CUDA graphs (`replayed`). Each is first compared with the
unmodified net in fp32.
`floor` is what the products of the transformed net take at the rates that the device reaches in
this run (FLOPs, bytes, and on a GPU the launch of a kernel, the largest of the three for each
product); `predicted` is the speed-up over the replicated net by the same sums, `share` what was
reached of it by `ours`, against the faster of the replicated forms.

Packages are built first, in processes of their own, and kept in build/bench. `--training` times
training steps of `late_ranking` instead; `--table` prints the result file as a table for docs.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import multiprocessing
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.end_to_end_training import training_rows
from bench.in_turn import in_turn
from examples.nets import NETS
from examples.nets import contestants as forms
from examples.nets.net import Config, Inputs, make_inputs
from ikbo import _inductor
from ikbo._archive import read_manifest
from ikbo.testing import bench, bench_cuda
from ikbo.testing.bench_results import ResultFile
from ikbo.testing.bench_sources import cuda_sources
from ikbo.transform import Spec

RATIOS = (10, 70, 500)
TRAINING_RATIOS = (10, 70)
PACKAGED = (*forms.OURS, *forms.PEERS)
CHECKED_ROWS = 48
CPU_COPIES = 5
# What packages are made of: the nets, and the Python that compiles them.
_FORMS = ["examples/nets/*.py", "python/ikbo/*.py", "python/ikbo/nn/*.py"]
_PASS = ["python/ikbo/transform/**/*.py"]
_TIMING = [f"bench/{name}.py" for name in ("bench_end_to_end", "end_to_end_training", "in_turn")]
_TIMING += [f"python/ikbo/testing/{name}.py" for name in ("bench", "bench_cuda")]
_NATIVE = ["include/ikbo/*.h", *(f"src/{folder}/*" for folder in ("common", "cpu", "torch_ops"))]
OPS = ("lce", "linear", "bmm", "target_attention", "expand")
SOURCES = {
    "cpu": [*_FORMS, *_PASS, *_TIMING, *_NATIVE],
    "cuda": sorted({f for op in OPS for f in cuda_sources(op, *_FORMS, *_PASS, *_TIMING)}),
}


@dataclass(frozen=True)
class Device:
    """Where it is measured, in which type, and what the device reaches."""

    name: str
    dtype: torch.dtype
    flops_per_ms: float = 0.0
    bytes_per_ms: float = 0.0
    launch_ms: float = 0.0

    @property
    def is_gpu(self) -> bool:
        return self.name == "cuda"

    def config(self, net: str) -> Config:
        return NETS[net].full if self.is_gpu else NETS[net].small

    def measured(self) -> Device:
        if not self.is_gpu:
            a, source = torch.randn(2048, 2048), torch.randn(2**26)
            target = torch.empty_like(source)
            times = bench.interleaved(
                {"gemm": lambda: a @ a, "copy": lambda: target.copy_(source)}, rounds=9
            )
            rates = 2 * 2048**3 / times["gemm"], 2 * source.nbytes / times["copy"]
            return Device(self.name, self.dtype, *rates)
        limits = bench_cuda.measured_limits()
        tiny = torch.zeros(8, device="cuda")
        chain = 64  # kernels, each of which waits for the one before

        def launches() -> Tensor:
            for _ in range(chain):
                tiny.add_(1)
            return tiny

        replays = bench_cuda.replayed({"chain": launches})
        launch = bench_cuda.timed(replays)["chain"]
        assert isinstance(launch, float), launch
        return Device(
            self.name, self.dtype, limits.flops_per_ms, limits.bytes_per_ms, launch / chain
        )

    def floor(self, spec: Spec, when: str, num_users: int, num_candidates: int) -> float:
        """Milliseconds that the products of a spec take, `when` is before or after."""
        total = 0.0
        for row in spec.rows:
            flops = getattr(row, f"flops_{when}")(num_users, num_candidates)
            moved = getattr(row, f"bytes_{when}")(num_users, num_candidates)
            if flops:
                times = flops / self.flops_per_ms, moved / self.bytes_per_ms, self.launch_ms
                total += max(times)
        return total


def device_of(name: str) -> Device:
    return Device(name, torch.float16 if name == "cuda" else torch.float32)


def path_of(device: Device, net: str, contestant: str) -> Path:
    state = bench.source_hash([*_FORMS, *_PASS] if contestant == "ours" else _FORMS)[:12]
    return bench.REPOSITORY / "build" / "bench" / f"{net}-{contestant}-{device.name}-{state}.pt2"


def build(device: Device, net: str, contestant: str, threads: int) -> float:
    """Builds a package, or fills the cache of `torch.compile` and leaves a mark; seconds taken."""
    begin = time.perf_counter()
    torch.set_num_threads(threads)
    config = device.config(net)
    path = path_of(device, net, contestant)
    path.parent.mkdir(parents=True, exist_ok=True)
    if contestant in forms.COMPILED:
        call = compiled(device, net, contestant)
        for ratio in RATIOS:
            call(Case(device, net, ratio).inputs())
        path.touch()
    else:
        limits = forms.limits_of(config, RATIOS)
        forms.package(net, contestant, config, limits, device.dtype, device.name, path)
    return time.perf_counter() - begin


def build_all(
    device: Device, nets: Sequence[str], workers: int, threads: int
) -> dict[tuple[str, str], str]:
    """Builds what is missing; (net, contestant) to the reason of what cannot be built."""
    missing = [
        (net, name)
        for net in nets
        for name in (*PACKAGED, *(forms.compiled_forms(net) if device.is_gpu else ()))
        if not path_of(device, net, name).exists()
    ]
    failed = {}
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(workers, mp_context=context) as pool:
        jobs = {pool.submit(build, device, *pair, threads): pair for pair in missing}
        for job in concurrent.futures.as_completed(jobs):
            if problem := job.exception():
                failed[jobs[job]] = bench_cuda.reason_of(problem)
                print(f"{' '.join(jobs[job])}: {problem}", file=sys.stderr, flush=True)
            else:
                print(f"built {' '.join(jobs[job])} in {job.result():.0f} s", flush=True)
    return failed


Batch = tuple[Inputs, Inputs, Tensor]
Call = Callable[[Batch], Tensor]
# Copies of one, of which a GPU has one; a string says why it does not run.
Contestant = Sequence[Callable[[], Tensor]] | str


def compiled(device: Device, net: str, contestant: str) -> Call:
    """`torch.compile` with the options of a package."""
    form = forms.form_of(net, contestant, device.config(net), device.dtype, device.name)
    options = {
        key: value
        for key, value in _inductor.compile_options(device.name).items()
        if not key.startswith("aot_inductor.")
    }
    call = torch.compile(form, dynamic=True, options=options)

    @torch.no_grad()
    def run(inputs: Batch) -> Tensor:
        return call(*inputs)

    return run


def loaded(path: Path) -> Call:
    run = torch._inductor.aoti_load_package(str(path), run_single_threaded=True)

    def call(inputs: Batch) -> Tensor:
        return run(*forms.flat(*inputs))[0]

    return call


@dataclass(frozen=True)
class Case:
    device: Device
    net: str
    ratio: int

    @property
    def config(self) -> Config:
        return self.device.config(self.net)

    @property
    def num_users(self) -> int:
        return forms.users_at(self.config, self.ratio)

    @property
    def num_candidates(self) -> int:
        return self.num_users * self.ratio

    def inputs(self) -> Batch:
        device = self.device
        sizes = (self.num_users, self.num_candidates)
        rows = make_inputs(self.config, *sizes, device.dtype, device.name)
        return *rows, forms.index_of(self.num_users, self.ratio, device.name)

    def row(self) -> dict[str, Any]:
        dtype = str(self.device.dtype).removeprefix("torch.")
        sizes = {"U": self.num_users, "B": self.num_candidates}
        return {"net": self.net, "ratio": self.ratio, **sizes, "dtype": dtype}


class Measured:
    """A net with its forms, compiled; `row` measures one ratio.

    Args:
        failed: contestant to the reason why it could not be built.
    """

    def __init__(self, device: Device, net: str, failed: Mapping[str, str]) -> None:
        copies = 1 if device.is_gpu else CPU_COPIES
        self.calls: dict[str, list[Call] | str] = {}
        for name in PACKAGED:
            path = path_of(device, net, name)
            self.calls[name] = failed.get(name) or [loaded(path) for _ in range(copies)]
        for name in forms.compiled_forms(net):
            self.calls[name] = failed.get(name) or [compiled(device, net, name)]
        self.exact = forms.plain_net(net, device.config(net), torch.float32, device.name)
        manifest = read_manifest(path_of(device, net, "ours"))
        self.spec = Spec.from_json(json.dumps(manifest.spec))

    def reference(self, inputs: Batch) -> Tensor:
        """The unmodified net in fp32, on the first candidates."""
        user, item, index = inputs
        few = index[:CHECKED_ROWS]
        users = {name: x[few.long()].float() for name, x in user.items()}
        items = {name: x[:CHECKED_ROWS].float() for name, x in item.items()}
        with torch.no_grad():
            return self.exact(users, items)

    def row(self, case: Case) -> dict[str, Any]:
        inputs = case.inputs()
        contestants = {
            name: calls if isinstance(calls, str) else [partial(call, inputs) for call in calls]
            for name, calls in self.calls.items()
        }
        times, replayed = timed(case.device, contestants, self.reference(inputs))
        sizes = (case.num_users, case.num_candidates)
        before, after = (case.device.floor(self.spec, when, *sizes) for when in ("before", "after"))
        replicated = (times[name] for name in times if name.startswith("replicated"))
        best = min((time for time in replicated if not isinstance(time, str)), default=None)
        ours = {name: times.pop(name) for name in forms.OURS}
        row: dict[str, Any] = {"case": case.row(), "unit": "ms", **ours, "peers": times}
        row |= {"floor": after, "predicted": before / after}
        if best is not None and not isinstance(ours["ours"], str):
            row["share"] = best / ours["ours"] / row["predicted"]
        return row | ({"replayed": replayed} if replayed else {})


def timed(
    device: Device, contestants: Mapping[str, Contestant], reference: Tensor
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Milliseconds of each, and as CUDA graphs; a reason for what fails or is wrong."""

    def few(out: Tensor) -> Tensor:
        return out[: len(reference)]

    if device.is_gpu:
        single = {
            name: calls if isinstance(calls, str) else calls[0]
            for name, calls in contestants.items()
        }
        running = bench_cuda.checked(single, reference, few)
        times = bench_cuda.timed(running)
        return times, bench_cuda.timed(bench_cuda.replayed(running))
    reasons = {name: calls for name, calls in contestants.items() if isinstance(calls, str)}
    running = {name: calls for name, calls in contestants.items() if not isinstance(calls, str)}
    for name, calls in running.items():
        error = float((few(calls[0]()) - reference).norm() / reference.norm())
        assert error < 1e-4, f"{name}: relative error {error:.3g}"
    return in_turn(running, rounds=41, min_rounds=7, seconds=40.0) | reasons, {}


def line_of(row: dict[str, Any]) -> str:
    case, ours = row["case"], row["ours"]
    parts = [f"{case['net']} ratio {case['ratio']} U={case['U']} B={case['B']}:"]
    times = {"ours": ours, "ours_adopted": row["ours_adopted"], **row["peers"]}
    for name, ms in times.items():
        is_known = not isinstance(ms, str) and not isinstance(ours, str)
        parts.append(f"{name} {ms:.4g} ms ({ms / ours:.2f}x)" if is_known else f"{name} {ms}")
    parts.append(f"floor {row['floor']:.4g} ms, predicted {row['predicted']:.2f}x")
    parts.append(f"reached {100 * row['share']:.0f} % of it" if "share" in row else "")
    return " ".join(parts)


def step_times(device: Device, steps: dict[str, Callable[[], None]]) -> dict[str, float]:
    """Medians in milliseconds, the contestants in turn."""
    if not device.is_gpu:
        return bench.interleaved(steps, rounds=15)

    def whole(step: Callable[[], None]) -> Callable[[], None]:
        def run() -> None:
            # The timers run in inference mode, which has no gradients.
            with torch.inference_mode(False), torch.enable_grad():
                step()

        return run

    return bench_cuda.interleaved_cuda(
        {name: whole(step) for name, step in steps.items()}, rounds=20, min_rounds=8, seconds=10.0
    )


_HEAD = (
    "net, ratio (U, B)", "ours", "adopted", "repeated, AOTI", "repeated, compile", "split, AOTI",
    "by hand", "over repeated", "over split", "predicted", "reached",
)  # fmt: skip


def table_of(rows: Sequence[Mapping[str, Any]]) -> str:
    """The rows that have a prediction, as Markdown; times in ms."""

    def shown(value: Any, form: str = "{:.4g}") -> str:
        return "-" if value is None or isinstance(value, str) else form.format(value)

    lines = [_HEAD, ("---",) * len(_HEAD)]
    for row in rows:
        if "predicted" not in row:
            continue
        case, ours, peers = row["case"], row["ours"], row["peers"]
        names = ("replicated_aoti", "replicated_compile", "net_split_aoti")
        times = [peers[name] for name in names]
        both = all(isinstance(x, float) for x in (ours, *times))
        ratios = [min(times[:2]) / ours, times[2] / ours] if both else [None, None]
        lines.append(
            (
                f"{case['net']}, {case['ratio']} ({case['U']}, {case['B']})",
                *(shown(x) for x in (ours, row["ours_adopted"], *times, peers.get(forms.PIECES))),
                *(shown(x, "{:.2f}x") for x in (*ratios, row["predicted"])),
                shown(row.get("share"), "{:.0%}"),
            )
        )
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def training_line(row: dict[str, Any]) -> str:
    ours, replicated, case = row["ours"], row["peers"]["replicated"], row["case"]
    return (
        f"{case['net']} training, ratio {case['ratio']}: {1e3 / ours:.1f} steps a second, "
        f"replicated {1e3 / replicated:.1f} ({replicated / ours:.2f}x); losses differ by at most "
        f"{row['largest_difference_of_losses']:.2g}, rounding explains "
        f"{row['replicated_from_wider_type']:.2g}"
    )


def arguments_of(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--nets", type=lambda text: text.split(","), default=list(NETS))
    parser.add_argument(
        "--ratios", type=lambda text: tuple(map(int, text.split(","))), default=RATIOS
    )
    parser.add_argument("--keep", action="store_true", help="keep the file's rows of other cases")
    parser.add_argument("--build-only", action="store_true", help="packages, no times")
    parser.add_argument("--training", action="store_true", help="training steps instead")
    parser.add_argument("--table", action="store_true", help="print the result file, no more")
    parser.add_argument("--workers", type=int, default=1, help="processes that build packages (1)")
    parser.add_argument("--threads", type=int, default=1, help="of PyTorch (1)")
    parser.add_argument("--output", type=Path, help="folder of the result file")
    args = parser.parse_args(argv)
    for what, given, known in (("--nets", args.nets, NETS), ("--ratios", args.ratios, RATIOS)):
        if unknown := [x for x in given if x not in known]:
            parser.error(f"{what} must be of {', '.join(map(str, known))}; got {unknown}")
    return args


def main() -> int:
    args = arguments_of()
    torch.set_num_threads(args.threads)
    device = device_of(args.device)
    place = "h200" if device.is_gpu else "cpu"
    if args.table:
        file = (args.output or bench.RESULTS) / f"end_to_end-{place}.json"
        print(table_of(json.loads(file.read_text())["rows"]))
        return 0
    results = ResultFile(
        "end_to_end", SOURCES[device.name], args.output, keep=args.keep, device=place
    )
    if args.training:
        ratios = tuple(ratio for ratio in args.ratios if ratio in TRAINING_RATIOS)
        for row in training_rows(
            device.config("late_ranking"), ratios, device.name, partial(step_times, device)
        ):
            results.add(row)
            print(training_line(row), flush=True)
        return 0
    failed = build_all(device, args.nets, args.workers, args.threads)
    if args.build_only:
        return 1 if failed else 0
    device = device.measured()
    print(device, flush=True)
    for net in args.nets:
        reasons = {c: why for (n, c), why in failed.items() if n == net}
        if "ours" in reasons:
            print(f"{net}: not measured; ours: {reasons['ours']}", file=sys.stderr)
            continue
        measured = Measured(device, net, reasons)
        for ratio in args.ratios:
            row = measured.row(Case(device, net, ratio))
            results.add(row)
            print(line_of(row), flush=True)
        del measured
        if device.is_gpu:
            torch.cuda.empty_cache()
    print(results.path, file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
