# SPDX-License-Identifier: Apache-2.0
"""What the demo keeps in `build/demo/`: the trained net and the packages, each made once."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

import torch

from examples.movielens import contestants
from examples.movielens.data import MovieLens
from examples.movielens.model import Ranker
from examples.movielens.train import evaluate, train
from ikbo._load import ops_library_path

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parents[1]
FOLDER = REPOSITORY / "build" / "demo"
TRAINING_SOURCES = [HERE / name for name in ("data.py", "model.py", "split.py", "train.py")]
PACKAGING_SOURCES = [HERE / "contestants.py", *(REPOSITORY / "python" / "ikbo").rglob("*.py")]


def fingerprint(paths: Iterable[Path]) -> str:
    """Changes with PyTorch's version and with any byte of the files."""
    digest = hashlib.sha256(torch.__version__.encode())
    for path in sorted(paths):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def made_once(path: Path, sources: Iterable[Path], make: Callable[[], None]) -> None:
    """Calls `make`, which writes `path`, unless it did so from the same sources before."""
    stamp = path.with_name(path.name + ".stamp")
    now = fingerprint(sources)
    if path.exists() and stamp.exists() and stamp.read_text() == now:
        print(f"  {path.relative_to(REPOSITORY)} is up to date", flush=True)
        return
    started = time.monotonic()
    make()
    stamp.write_text(now)
    seconds = time.monotonic() - started
    print(f"  made {path.relative_to(REPOSITORY)} in {seconds:.0f} s", flush=True)


def trained(data: MovieLens, history: bool = True) -> tuple[Ranker, dict[str, float]]:
    """The net with its AUCs (see `train.evaluate`)."""
    path = FOLDER / ("ranker.pt" if history else "ranker-no-history.pt")

    def make() -> None:
        net = train(data, history)
        print("  measuring the held-out AUC", flush=True)
        torch.save({"net": net.state_dict(), "auc": evaluate(net, data, history)}, path)

    made_once(path, TRAINING_SOURCES, make)
    saved = torch.load(path)
    net = Ranker().eval()
    net.load_state_dict(saved["net"])
    return net, saved["auc"]


def packages(net: Ranker, data: MovieLens) -> dict[str, Path]:
    """Contestant to its package."""
    makers = {
        "replicated": contestants.package_replicated,
        "split": contestants.package_split,
        "ikbo": contestants.package_ikbo,
    }
    sources = [FOLDER / "ranker.pt", ops_library_path(), *TRAINING_SOURCES, *PACKAGING_SOURCES]
    found = {name: FOLDER / f"{name}.pt2" for name in makers}
    for name, make in makers.items():
        made_once(found[name], sources, partial(make, net, data, found[name]))
    return found
