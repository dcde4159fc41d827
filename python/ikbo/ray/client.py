# SPDX-License-Identifier: Apache-2.0
"""The client's part when a replica dies: send the request again.

An infer request has no effect but its answer, so that it may be sent as often as it takes. It is,
when the connection broke, or for the statuses that say "not now": 429, 503, and the 500 and 502
that a proxy answers for a replica that died (the server's own 500 is JSON with ``error``, and
another try would end as it did).
"""

from __future__ import annotations

import http.client
import json
import random
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit


@dataclass(frozen=True)
class RetryPolicy:
    """How long, and how often, to send a request again.

    Args:
        deadline_s: from the first try to the last answer.
        first_wait_s: before the second try; doubled from one to the next, and each drawn between
            half and all of it, so that clients do not come back together.
        max_wait_s: no wait is longer.
    """

    deadline_s: float = 10.0
    first_wait_s: float = 0.02
    max_wait_s: float = 1.0

    def waits(self, seed: int | None = None) -> Iterator[float]:
        """The waits, without end."""
        rng = random.Random(seed)
        wait = self.first_wait_s
        while True:
            yield wait * rng.uniform(0.5, 1.0)
            wait = min(2 * wait, self.max_wait_s)


def may_retry(status: int, body: bytes) -> bool:
    """Whether another try may end otherwise."""
    if status in (429, 502, 503):
        return True
    return status == 500 and not _is_servers_own(body)


def _is_servers_own(body: bytes) -> bool:
    try:
        return "error" in json.loads(body)
    except (ValueError, TypeError):
        return False


def infer(
    url: str,
    body: bytes,
    headers: Mapping[str, str],
    policy: RetryPolicy | None = None,
) -> tuple[int, Mapping[str, str], bytes]:
    """Posts an infer request until it has an answer that counts.

    Args:
        url: ``http://host:port/v2/models/M/infer``.
        body: as the Open Inference Protocol has it.
        headers: with the user under ``ikbo.ray.USER_HEADER``, for affinity.
        policy: None: the default one.

    Returns:
        Status, headers and body; of the last try when the deadline has passed.

    Errors:
        OSError, http.client.HTTPException: of the last try, when that got no answer.
    """
    policy = policy or RetryPolicy()
    deadline = time.monotonic() + policy.deadline_s
    for wait in policy.waits():
        is_last = time.monotonic() + wait >= deadline
        try:
            status, fields, answer = _post(
                url, body, headers, max(0.1, deadline - time.monotonic())
            )
            if is_last or not may_retry(status, answer):
                return status, fields, answer
        except (OSError, http.client.HTTPException):
            if is_last:
                raise
        time.sleep(wait)
    raise AssertionError("the waits have no end")


def _post(
    url: str, body: bytes, headers: Mapping[str, str], timeout: float
) -> tuple[int, Mapping[str, str], bytes]:
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=timeout)
    try:
        connection.request("POST", parts.path, body, dict(headers))
        answer = connection.getresponse()
        return answer.status, dict(answer.headers.items()), answer.read()
    finally:
        connection.close()
