# SPDX-License-Identifier: Apache-2.0
"""MovieLens 100k as ranking requests: one user with a history, many candidate films.

Events are sorted by time; the first 80 % train, the rest is held out. A request is one moment of
one user: its history holds the user's events strictly before it, its targets are the next ones.
"""

from __future__ import annotations

import csv
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

PACKAGE = "recbole==1.2.1"  # ships the MovieLens 100k tables as text
TABLES = ("ml-100k.inter", "ml-100k.user", "ml-100k.item")

MAX_HISTORY = 200
MAX_GENRES = 6
NUM_TARGETS = 8  # events of one user that share a request
TRAIN_SHARE = 0.8
FIRST_YEAR = 1920
# Vocabulary sizes of the inputs; 0 means unknown or padding everywhere.
VOCABULARY = {
    "user_id": 944,
    "age": 80,
    "gender": 3,
    "occupation": 22,
    "zip_prefix": 101,
    "hour": 24,
    "weekday": 7,
    "idle_gap": 26,
    "item_id": 1683,
    "item_year": 80,
    "item_genres": 20,
    "item_popularity": 12,
    "item_score": 12,
    "rating": 6,
    "gap": 26,
}
USER_INPUTS = (
    "user_id",
    "age",
    "gender",
    "occupation",
    "zip_prefix",
    "hour",
    "weekday",
    "idle_gap",
    "history_item",
    "history_rating",
    "history_gap",
    "history_length",
)
CANDIDATE_INPUTS = ("item_id", "item_year", "item_genres", "item_popularity", "item_score")


def fetch_tables(folder: Path) -> Path:
    """Returns the folder below `folder` with the three tables, downloaded on the first call."""
    target = folder / "ml-100k"
    if all((target / name).exists() for name in TABLES):
        return target
    folder.mkdir(parents=True, exist_ok=True)
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder)]
    done = subprocess.run([*pip, PACKAGE], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(
            f"movielens: could not download {PACKAGE}, the package that holds the data. It is "
            "needed once: connect to a package index and call this again. pip said:\n"
            f"{done.stderr.strip()}"
        )
    target.mkdir(exist_ok=True)
    with zipfile.ZipFile(next(folder.glob("recbole-*.whl"))) as wheel:
        for name in TABLES:
            data = wheel.read(f"recbole/dataset_example/ml-100k/{name}")
            (target / name).write_bytes(data)
    return target


def read_table(path: Path) -> list[dict[str, str]]:
    """Rows of one table; its column types are cut from the names (`user_id:token`)."""
    with path.open(newline="", encoding="utf-8") as file:
        rows = csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE)
        names = [column.split(":")[0] for column in next(rows)]
        return [dict(zip(names, row, strict=True)) for row in rows]


def log_bucket(value: np.ndarray, count: int) -> np.ndarray:
    """floor(log2(1 + value)), at most count - 1."""
    return np.minimum(np.log2(1.0 + value).astype(np.int64), count - 1)


@dataclass(frozen=True)
class Request:
    """One moment of one user; the first of `targets`, numbers of the user's events, sets it."""

    user: int
    num_history: int  # events of the user that lie strictly before the moment
    targets: range


class MovieLens:
    """Features of users and films, and each user's events in time order.

    Args:
        folder: where the three tables are.
    """

    def __init__(self, folder: Path) -> None:
        self._read_events(read_table(folder / TABLES[0]))
        self._read_users(read_table(folder / TABLES[1]))
        self._read_items(read_table(folder / TABLES[2]))

    def _read_events(self, rows: list[dict[str, str]]) -> None:
        names = ("user_id", "item_id", "rating", "timestamp")
        table = np.array([[int(float(row[name])) for name in names] for row in rows])
        table = table[np.lexsort((table[:, 1], table[:, 0], table[:, 3]))]
        self.cut_time = int(table[int(TRAIN_SHARE * len(table)), 3])
        self.events = {  # user -> [events, (item, rating, time)]
            int(user): table[table[:, 0] == user, 1:] for user in np.unique(table[:, 0])
        }
        train = table[table[:, 3] < self.cut_time]
        size = VOCABULARY["item_id"]
        self.popularity = np.bincount(train[:, 1], minlength=size)
        total = np.bincount(train[:, 1], weights=train[:, 2], minlength=size)
        self.mean_rating = total / np.maximum(self.popularity, 1)

    def _read_users(self, rows: list[dict[str, str]]) -> None:
        occupations = sorted({row["occupation"] for row in rows})
        columns = np.zeros((4, VOCABULARY["user_id"]), dtype=np.int64)
        for row in rows:
            zip_prefix = row["zip_code"][:2]
            columns[:, int(row["user_id"])] = (
                min(int(row["age"]), VOCABULARY["age"] - 1),
                "MF".index(row["gender"]) + 1,
                occupations.index(row["occupation"]) + 1,
                int(zip_prefix) + 1 if zip_prefix.isdigit() else 0,
            )
        self.profile = dict(zip(USER_INPUTS[1:5], columns, strict=True))

    def _read_items(self, rows: list[dict[str, str]]) -> None:
        size = VOCABULARY["item_id"]
        names = sorted({genre for row in rows for genre in row["class"].split()})
        year = np.zeros(size, dtype=np.int64)
        genres = np.zeros((size, MAX_GENRES), dtype=np.int64)
        self.titles = [""] * size
        self.film_ids = np.array([int(row["item_id"]) for row in rows])
        for row in rows:
            item = int(row["item_id"])
            self.titles[item] = row["movie_title"]
            if row["release_year"].isdigit():
                since = int(row["release_year"]) - FIRST_YEAR
                year[item] = min(max(since, 1), VOCABULARY["item_year"] - 1)
            numbers = [names.index(genre) + 1 for genre in row["class"].split()][:MAX_GENRES]
            genres[item, : len(numbers)] = numbers
        score = np.where(self.popularity > 0, 1 + np.rint(2.5 * (self.mean_rating - 1)), 0)
        self.films = {
            "item_year": year,
            "item_genres": genres,
            "item_popularity": log_bucket(self.popularity, VOCABULARY["item_popularity"]),
            "item_score": score.astype(np.int64),
        }

    def requests(self, held_out: bool) -> list[Request]:
        """Every user's events on one side of the split, `NUM_TARGETS` in a row to a request."""
        found = []
        for user, events in self.events.items():
            times = events[:, 2]
            split = int(np.searchsorted(times, self.cut_time))
            first, last = (split, len(times)) if held_out else (0, split)
            for start in range(first, last, NUM_TARGETS):
                targets = range(start, min(start + NUM_TARGETS, last))
                found.append(Request(user, int(np.searchsorted(times, times[start])), targets))
        return found

    def unseen(self, user: int) -> np.ndarray:
        """Films for which the user has no event at all."""
        return np.setdiff1d(self.film_ids, self.events[user][:, 0])

    def user_rows(self, requests: list[Request], history: bool = True) -> dict[str, Tensor]:
        """The user inputs, one row a request; without `history` every history is empty."""
        rows: dict[str, np.ndarray] = {
            name: np.zeros((len(requests), MAX_HISTORY), dtype=np.int64)
            for name in ("history_item", "history_rating", "history_gap")
        }
        users = np.array([request.user for request in requests])
        moments = np.zeros(len(requests), dtype=np.int64)
        idle = np.zeros(len(requests))
        length = np.zeros(len(requests), dtype=np.int64)
        for row, request in enumerate(requests):
            events = self.events[request.user]
            moments[row] = events[request.targets[0], 2]
            past = events[max(0, request.num_history - MAX_HISTORY) : request.num_history]
            gaps = moments[row] - past[:, 2]
            idle[row] = gaps[-1] if len(past) else np.inf
            length[row] = len(past) if history else 0
            rows["history_item"][row, : length[row]] = past[: length[row], 0]
            rows["history_rating"][row, : length[row]] = past[: length[row], 1]
            rows["history_gap"][row, : length[row]] = log_bucket(
                gaps[: length[row]], VOCABULARY["gap"]
            )
        rows |= {name: column[users] for name, column in self.profile.items()}
        rows |= {
            "user_id": users,
            "hour": moments // 3600 % 24,
            "weekday": moments // 86400 % 7,
            "idle_gap": log_bucket(np.minimum(idle, 2.0**40), VOCABULARY["idle_gap"]),
            "history_length": length,
        }
        return {name: torch.from_numpy(np.ascontiguousarray(rows[name])) for name in USER_INPUTS}

    def candidate_rows(self, items: np.ndarray) -> dict[str, Tensor]:
        """The candidate inputs of the films `items`, one row each."""
        rows = {"item_id": items.astype(np.int64)}
        rows |= {name: column[items] for name, column in self.films.items()}
        return {name: torch.from_numpy(rows[name]) for name in CANDIDATE_INPUTS}
