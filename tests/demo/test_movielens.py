# SPDX-License-Identifier: Apache-2.0
"""The MovieLens example: its data, its net and the hand-split form, on tables made here."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from examples.movielens import data as movielens
from examples.movielens import serving
from examples.movielens.demo import result_rows, summarise
from examples.movielens.flops import flops_per_candidate
from examples.movielens.measure import Answers
from examples.movielens.model import Ranker
from examples.movielens.split import SplitRanker, replicate
from examples.movielens.train import make_batch, request_auc

DAY = 86400
NUM_FILMS = 60
NUM_RATED = 30
NUM_EVENTS = {1: 30, 2: 12, 3: 250}  # user -> events, one an hour, all users at once


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three users; user 3 has more events than a history holds."""
    folder = tmp_path_factory.mktemp("ml-100k")
    events = ["user_id:token\titem_id:token\trating:float\ttimestamp:float"]
    for user, count in NUM_EVENTS.items():
        for n in range(count):
            events.append(f"{user}\t{1 + n % NUM_RATED}\t{1 + n % 5}\t{1000 * DAY + 3600 * n}")
    users = ["user_id:token\tage:token\tgender:token\toccupation:token\tzip_code:token"]
    users += ["1\t24\tM\twriter\t85711", "2\t53\tF\tother\tV3N4P", "3\t99\tF\tother\t00123"]
    films = ["item_id:token\tmovie_title:token_seq\trelease_year:token\tclass:token_seq"]
    films += [f"{n}\tFilm {n}\t{1900 + n}\tDrama War" for n in range(1, NUM_FILMS)]
    films.append(f"{NUM_FILMS}\tFilm {NUM_FILMS}\tunknown\tunknown")
    for name, lines in zip(movielens.TABLES, (events, users, films), strict=True):
        (folder / name).write_text("\n".join(lines) + "\n")
    return folder


@pytest.fixture(scope="module")
def data(tables: Path) -> movielens.MovieLens:
    return movielens.MovieLens(tables)


@pytest.fixture(scope="module")
def net() -> Ranker:
    torch.manual_seed(0)
    return Ranker().eval()


@pytest.fixture(scope="module")
def inputs(data: movielens.MovieLens) -> dict[str, Tensor]:
    """Three requests of different users, one of them without a history."""
    chosen = [data.requests(held_out=False)[n] for n in (0, 5, 12)]
    return make_batch(data, chosen, 6, np.random.default_rng(0), history=True).inputs


def test_the_split_is_by_time(data: movielens.MovieLens) -> None:
    for held_out in (False, True):
        for request in data.requests(held_out):
            times = data.events[request.user][request.targets, 2]
            assert ((times >= data.cut_time) == held_out).all()
    total = sum(len(r.targets) for held_out in (0, 1) for r in data.requests(bool(held_out)))
    assert total == sum(NUM_EVENTS.values())


def test_a_history_ends_strictly_before_its_request(data: movielens.MovieLens) -> None:
    for request in data.requests(held_out=False) + data.requests(held_out=True):
        times = data.events[request.user][:, 2]
        moment = times[request.targets[0]]
        assert (times[: request.num_history] < moment).all()
        assert (times[request.num_history :] >= moment).all()


def test_a_history_keeps_the_newest_events(data: movielens.MovieLens) -> None:
    request = [r for r in data.requests(held_out=True) if r.user == 3][-1]
    rows = data.user_rows([request])
    length = movielens.MAX_HISTORY
    assert request.num_history > length and rows["history_length"].item() == length
    newest = data.events[3][request.num_history - length : request.num_history]
    assert rows["history_item"][0].tolist() == newest[:, 0].tolist()
    assert rows["history_rating"][0].tolist() == newest[:, 1].tolist()
    assert rows["history_gap"][0, -1] == np.log2(1 + 3600) // 1


def test_ids_are_within_their_vocabularies(
    data: movielens.MovieLens, inputs: dict[str, Tensor]
) -> None:
    names = {"history_item": "item_id", "history_rating": "rating", "history_gap": "gap"}
    for name, values in inputs.items():
        if name not in ("history_length", "cand_to_user"):
            assert values.min() >= 0 and values.max() < movielens.VOCABULARY[names.get(name, name)]
    assert data.profile["age"].tolist()[1:4] == [24, 53, movielens.VOCABULARY["age"] - 1]
    assert data.profile["zip_prefix"].tolist()[1:4] == [86, 0, 1]
    assert data.films["item_year"][[1, NUM_FILMS]].tolist() == [1, 0]


def test_what_the_future_says_of_a_film_is_not_in_its_features(
    data: movielens.MovieLens,
) -> None:
    events = np.concatenate(list(data.events.values()))
    before = events[events[:, 2] < data.cut_time]
    assert data.popularity.sum() == len(before) < len(events)


def test_without_history_every_history_is_empty(data: movielens.MovieLens) -> None:
    rows = data.user_rows(data.requests(held_out=True), history=False)
    assert all(not rows[name].any() for name in rows if name.startswith("history"))


def test_drawn_films_are_unseen(data: movielens.MovieLens) -> None:
    requests = [r for r in data.requests(held_out=True) if r.user == 3][:1]
    batch = make_batch(data, requests, 20, np.random.default_rng(0), history=True)
    seen = set(data.events[3][:, 0].tolist())
    watched = batch.watched.bool()
    assert set(batch.inputs["item_id"][watched].tolist()) <= seen
    assert not set(batch.inputs["item_id"][~watched].tolist()) & seen
    assert not batch.liked[~watched].any()


def test_offline_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failed = subprocess.CompletedProcess([], 1, "", "ERROR: No matching distribution found")
    monkeypatch.setattr(subprocess, "run", lambda *_args, **_options: failed)
    with pytest.raises(RuntimeError, match=r"(?s)recbole.*connect.*No matching distribution"):
        movielens.fetch_tables(tmp_path)


def test_fetched_tables_are_reused(
    tables: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subprocess, "run", lambda *_args, **_options: pytest.fail("downloads"))
    (tmp_path / "ml-100k").symlink_to(tables)
    assert movielens.fetch_tables(tmp_path) == tmp_path / "ml-100k"


@torch.no_grad()
def test_hand_split_equals_replicated(net: Ranker, inputs: dict[str, Tensor]) -> None:
    shuffled = torch.randperm(len(inputs["item_id"]), generator=torch.Generator().manual_seed(0))
    mixed = {
        name: x if name in movielens.USER_INPUTS else x[shuffled] for name, x in inputs.items()
    }
    double = Ranker().double().eval()
    double.load_state_dict(net.state_dict())
    split, replicated = SplitRanker(double)(**mixed), double(**replicate(mixed))
    for name in ("watch", "like"):
        torch.testing.assert_close(split[name], replicated[name], rtol=1e-12, atol=1e-12)


@torch.no_grad()
def test_rows_do_not_depend_on_each_other(net: Ranker, inputs: dict[str, Tensor]) -> None:
    rows = replicate(inputs)
    alone = net(**{name: x[4:5] for name, x in rows.items()})
    together = net(**rows)
    for name, values in alone.items():
        torch.testing.assert_close(values, together[name][4:5], rtol=1e-5, atol=1e-5)


def test_padding_has_no_influence(net: Ranker, inputs: dict[str, Tensor]) -> None:
    rows = replicate(inputs)
    padding = torch.arange(movielens.MAX_HISTORY) >= rows["history_length"][:, None]
    filled = dict(rows)
    for name in ("history_item", "history_rating", "history_gap"):
        filled[name] = torch.where(padding, 3, rows[name])
    with torch.no_grad():
        for name, values in net(**rows).items():
            torch.testing.assert_close(values, net(**filled)[name], rtol=1e-5, atol=1e-5)
            assert values.isfinite().all()


def test_the_net_exports_with_a_dynamic_batch(net: Ranker, inputs: dict[str, Tensor]) -> None:
    rows = replicate(inputs)
    batch = torch.export.Dim("B", min=1, max=4096)
    program = torch.export.export(net, (), rows, dynamic_shapes={name: {0: batch} for name in rows})
    few = {name: x[:3] for name, x in rows.items()}
    with torch.no_grad():
        expected, got = net(**few), program.module()(**few)
    assert list(got) == ["watch", "like"]
    for name in got:
        torch.testing.assert_close(got[name], expected[name])


def test_most_work_is_the_users(net: Ranker, inputs: dict[str, Tensor]) -> None:
    total, user = flops_per_candidate(net, inputs)
    assert 0.7 * total < user <= 0.8 * total


def test_auc_of_a_request() -> None:
    positive = np.array([True, False, True, False])
    assert request_auc(np.array([3.0, 1.0, 2.0, 0.0]), positive) == 1.0
    assert request_auc(np.array([3.0, 3.0, 0.0, 1.0]), positive) == 0.375


def test_a_request_is_encoded_as_its_header_says() -> None:
    inputs = {"a": np.arange(6).reshape(2, 3), "b": np.array([7], dtype=np.int32)}
    body, headers = serving.encode(inputs)
    head_bytes = int(headers[serving.HEADER_LENGTH])
    described = json.loads(body[:head_bytes])["inputs"]
    assert [(d["name"], d["datatype"], d["shape"]) for d in described] == [
        ("a", "INT64", [2, 3]),
        ("b", "INT32", [1]),
    ]
    assert body[head_bytes:] == inputs["a"].tobytes() + inputs["b"].tobytes()


def test_an_answer_is_decoded_as_its_header_says() -> None:
    values = {"x": np.array([1.5, -2.0], dtype=np.float32), "n": np.array([[4]])}
    described = [
        {
            "name": name,
            "datatype": serving.WIRE_NAMES[x.dtype.name],
            "shape": x.shape,
            "parameters": {"binary_data_size": x.nbytes},
        }
        for name, x in values.items()
    ]
    head = json.dumps({"outputs": described}).encode()
    body = head + b"".join(x.tobytes() for x in values.values())
    decoded = serving.decode(body, len(head))
    for name, expected in values.items():
        np.testing.assert_array_equal(decoded[name], expected)


def test_a_wrong_answer_is_noticed() -> None:
    class Wrong:
        def infer(self, body: bytes, headers: dict[str, str]) -> dict[str, np.ndarray]:
            return {"watch": np.array([1.0, np.nan])}

    from examples.movielens.measure import Exchange

    answers = Answers()
    answers.ask(Wrong(), Exchange(b"", {}, {"watch": np.array([1.0, 2.0])}))  # type: ignore
    assert np.isnan(answers.max_abs_diff)


def test_results_hold_each_contestants_latency() -> None:
    slowness = {"replicated": 30.0, "split": 20.0, "ikbo": 10.0}

    def answers(scale: float) -> dict[str, Answers]:
        return {name: Answers([scale * x] * 99 + [5e3], 0.0, 1.0) for name, x in slowness.items()}

    rows = result_rows(summarise({}, answers(1), answers(4)))
    figures = {(row["case"]["figure"], row["case"]["clients"]): row for row in rows}
    assert len(figures) == len(rows) == 4
    for clients, scale in ((1, 1), (4, 4)):
        row = figures["p50", clients]
        assert row["ours"] == 10 * scale
        assert row["peers"] == {"replicated": 30 * scale, "split": 20 * scale}
        assert row["unit"] == "ms"
        assert figures["p99", clients]["ours"] > row["ours"]
