# SPDX-License-Identifier: Apache-2.0
"""Recorded requests: user columns found by value, batches taken apart bit by bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ikbo
from ikbo.legacy import Proposal, deduplicate, find_request_only

REQUESTS = 40


def recorded(seed: int = 0, counts: Any = None) -> tuple[dict[str, Tensor], Tensor]:
    """Interleaved requests: users, candidates, and a packed matrix of both (columns 1, 3:6)."""
    generator = torch.Generator().manual_seed(seed)
    counts = torch.randint(1, 9, (REQUESTS,), generator=generator) if counts is None else counts
    owner = torch.repeat_interleave(torch.arange(len(counts)), counts)
    owner = owner[torch.randperm(len(owner), generator=generator)]
    users = torch.randn(len(counts), 4, generator=generator)
    users[3] = float("nan")
    users[5, 0] = -0.0
    rows = len(owner)
    x = torch.randn(rows, 8, generator=generator)
    x[:, [1, 3, 4, 5]] = users[owner]
    history = torch.randint(1, 99, (len(counts), 6), generator=generator)
    history[:, 4:] = 0  # padding, the same for all
    batch = {
        "user_id": torch.arange(100, 100 + len(counts))[owner],
        "history": history[owner],
        "item_id": torch.randint(999, (rows,), generator=generator),
        "x": x,
    }
    return batch, 7 * owner + 1


BATCH, IDS = recorded()


def verdicts(proposal: Proposal) -> dict[str, str]:
    return {found.name: found.verdict for found in proposal.findings}


def test_user_columns_are_found() -> None:
    proposal = find_request_only(BATCH, IDS)
    assert proposal.request_only == ("user_id", "history", "x[:, [1, 3:6]]")
    assert verdicts(proposal) == {
        "user_id": "user",
        "history": "user",
        "item_id": "candidate",
        "x[:, 0]": "candidate",
        "x[:, 1]": "user",
        "x[:, 2]": "candidate",
        "x[:, 3:6]": "user",
        "x[:, 6:8]": "candidate",
    }
    assert proposal.num_requests == int((torch.bincount(IDS) > 1).sum())
    rows = next(found.example for found in proposal.findings if found.name == "item_id")
    assert rows is not None
    assert IDS[rows[0]] == IDS[rows[1]]
    assert BATCH["item_id"][rows[0]] != BATCH["item_id"][rows[1]]
    assert "user       x[:, 3:6]: constant, by accident at odds" in proposal.table()


def test_names_of_columns() -> None:
    columns = {"x": {"price": 0, "age": 1, "embedding": (3, 6), "rest": (6, 8)}}
    proposal = find_request_only({"x": BATCH["x"]}, IDS.tolist(), columns=columns)
    assert proposal.request_only == ("x.age", "x.embedding")


def test_columns_of_another_axis() -> None:
    fields = torch.randn(len(IDS), 5, 3)
    fields[:, 1:3] = BATCH["x"][:, [3, 4]].unsqueeze(-1).expand(-1, -1, 3)
    proposal = find_request_only({"fields": fields, "item_id": BATCH["item_id"]}, IDS)
    assert proposal.request_only == ("fields[:, 1:3]",)


def test_several_rows_per_candidate() -> None:
    ids = torch.stack([BATCH["user_id"], BATCH["item_id"], BATCH["history"][:, 0]], 1).flatten()
    proposal = find_request_only({"ids": ids}, IDS, row_counts={"ids": 3})
    assert proposal.request_only == ("ids[:, [0, 2]]",)


def test_positional_and_nested_inputs() -> None:
    class Model(nn.Module):
        def forward(self, features: dict[str, Tensor], x: Tensor) -> Tensor:
            return x

    nested = {"user_id": BATCH["user_id"], "item_id": BATCH["item_id"]}
    proposal = find_request_only((nested, BATCH["x"][:, 3]), IDS, model=Model())
    assert proposal.request_only == ("features.user_id", "x")
    with pytest.raises(TypeError, match="model must be given"):
        find_request_only((nested, BATCH["x"]), IDS)


def test_constant_of_the_whole_batch_is_undecided() -> None:
    """A flag that is 0 for every row may be anybody's, and one that is so but for one row too."""
    rare = torch.zeros(len(IDS))
    rare[int((torch.bincount(IDS)[IDS] == 1).nonzero()[0])] = 1
    often = (torch.bincount(IDS)[IDS] > 7).float()
    batch = {"flag": torch.zeros(len(IDS)), "item_id": BATCH["item_id"], "rare": rare}
    proposal = find_request_only(batch, IDS)
    assert proposal.request_only == ()
    assert [found.verdict for found in proposal.findings] == ["undecided", "candidate", "undecided"]
    # The same for all candidates of a request, and different between requests often enough.
    decided = find_request_only({**batch, "often": often}, IDS)
    assert decided.request_only == ("often",)


def test_few_requests_decide_nothing() -> None:
    batch, ids = recorded(counts=torch.tensor([2, 1, 2, 1, 1, 1]))
    proposal = find_request_only(batch, ids)
    assert proposal.request_only == ()
    assert verdicts(proposal)["user_id"] == "undecided"
    assert find_request_only(batch, ids, max_chance=0.5).request_only[0] == "user_id"


def test_chance_is_that_of_the_definition() -> None:
    """Two requests of two rows, two values with half of the rows each: (1/4 + 1/4)^2."""
    ids = torch.tensor([0, 0, 1, 1])
    batch = {"user": torch.tensor([5, 5, 6, 6]), "item": torch.arange(4)}
    assert find_request_only(batch, ids).findings[0].chance == pytest.approx(0.25)


def test_nearly_constant_column_is_not_proposed() -> None:
    broken = {**BATCH, "user_id": BATCH["user_id"].clone()}
    (row, *_) = (torch.bincount(IDS)[IDS] > 4).nonzero().flatten().tolist()
    broken["user_id"][row] += 1
    proposal = find_request_only(broken, IDS)
    assert "user_id" not in proposal.request_only
    found = proposal.findings[0]
    assert (found.verdict, found.varying) == ("nearly", 1)
    assert found.example is not None
    assert row in found.example or int(IDS[row]) == int(IDS[found.example[0]])
    assert "nearly     user_id: varies in 1 requests, rows" in proposal.table()


def test_requests_with_one_candidate_prove_nothing() -> None:
    with pytest.raises(ValueError, match="one candidate prove nothing; at least one of the"):
        find_request_only(BATCH, range(len(IDS)))


def test_rows_and_ids_must_agree() -> None:
    with pytest.raises(ValueError, match="one row for each of the 3 request ids; got {'user_id'"):
        find_request_only(BATCH, [1, 1, 2])


def bits(x: Tensor) -> bytes:
    return x.contiguous().numpy().tobytes()


REQUEST_ONLY = ["user_id", "history", "x[:, [1, 3:6]]"]


@pytest.mark.parametrize("share_users", [False, True])
def test_batch_is_taken_apart_losslessly(share_users: bool) -> None:
    shared = deduplicate(BATCH, IDS, REQUEST_ONLY, share_users=share_users)
    assert isinstance(shared.inputs, dict)
    index = shared.index.cand_to_user.long()
    assert shared.index.num_users == REQUESTS
    for name in ("user_id", "history"):
        assert bits(shared.inputs[name][index]) == bits(BATCH[name])
        assert len(shared.inputs[name]) == REQUESTS
    assert bits(shared.inputs["item_id"]) == bits(BATCH["item_id"])
    x = torch.empty_like(BATCH["x"])
    x[:, [1, 3, 4, 5]] = shared.inputs["x"]["user"][index]
    x[:, [0, 2, 6, 7]] = shared.inputs["x"]["cand"]
    assert bits(x) == bits(BATCH["x"])


def test_users_are_shared_between_requests_when_asked() -> None:
    """Two requests of one user, and two whose users differ in the sign of a zero alone."""
    user = torch.tensor([[1.0, float("nan")], [1.0, float("nan")], [0.0, 2.0], [-0.0, 2.0]])
    ids = torch.tensor([3, 1, 1, 0, 3, 2])
    place = {3: 0, 1: 1, 0: 2, 2: 3}
    batch = {"user": user[[place[int(i)] for i in ids]], "item": torch.arange(6)}
    apart = deduplicate(batch, ids, ["user"])
    assert apart.index.num_users == 4
    for shared in (
        deduplicate(batch, ids, ["user"], share_users=True),
        deduplicate(batch, None, ["user"]),
    ):
        assert shared.index.cand_to_user.tolist() == [0, 0, 0, 1, 0, 2]
        assert isinstance(shared.inputs, dict)
        again = shared.inputs["user"][shared.index.cand_to_user.long()]
        assert bits(again) == bits(batch["user"])


def test_a_value_that_differs_is_refused() -> None:
    broken = {**BATCH, "x": BATCH["x"].clone()}
    row = int((torch.bincount(IDS)[IDS] > 4).nonzero()[-1])
    broken["x"][row, 4] += 1
    with pytest.raises(ValueError, match=r"'x.user' must be the same .* rows \d+ and \d+ of one"):
        deduplicate(broken, IDS, REQUEST_ONLY)
    # What is no user column may differ.
    deduplicate(broken, IDS, ["user_id"])


class Ranker(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).squeeze(-1)


def test_from_the_record_to_the_transformed_model() -> None:
    model = Ranker().eval()
    batch = {"x": BATCH["x"].nan_to_num()}
    proposal = find_request_only(batch, IDS)
    fast = ikbo.transform(model, batch, proposal.request_only, max_candidates=1024)
    shared = deduplicate(batch, IDS, proposal.request_only)
    assert isinstance(shared.inputs, dict)
    with torch.no_grad():
        got = fast(**shared.inputs, cand_to_user=shared.index.cand_to_user)
        torch.testing.assert_close(got, model(**batch))
