# SPDX-License-Identifier: Apache-2.0
"""Trains the net without its history as well and writes both AUCs to `bench/results/`.

python -m examples.movielens.ablation
"""

from __future__ import annotations

import sys

import torch

from examples.movielens.artefacts import FOLDER, TRAINING_SOURCES, trained
from examples.movielens.data import MovieLens, fetch_tables
from examples.movielens.demo import THREADS
from ikbo.testing.bench import write_results


def main() -> int:
    torch.set_num_threads(THREADS)
    FOLDER.mkdir(parents=True, exist_ok=True)
    data = MovieLens(fetch_tables(FOLDER))
    print("with history", flush=True)
    _, full = trained(data)
    print("without history", flush=True)
    _, ablated = trained(data, history=False)
    peers = {"popularity": full["auc_popularity"], "no_history": ablated["auc"]}
    row = {"case": {"data": "ml-100k"}, "unit": "auc", "ours": full["auc"], "peers": peers}
    write_results("movielens-auc", [row], sources=TRAINING_SOURCES)
    print(f"AUC {full['auc']:.4f}; " + ", ".join(f"{n} {auc:.4f}" for n, auc in peers.items()))
    for name, auc in peers.items():
        if full["auc"] <= auc:
            print(f"FAILED: the net's AUC does not beat {name}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
