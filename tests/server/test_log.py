# SPDX-License-Identifier: Apache-2.0
"""Whoever reads the server's log may go, or stop reading."""

from __future__ import annotations

import http.client
import re
import signal
import subprocess
from collections.abc import Iterator
from typing import IO

import pytest

from ikbo._load import ops_library_path
from tests.server.serving import Served, server_path


class Chatty:
    """A server that logs every request into a pipe."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        assert process.stderr is not None
        self.process, self.log = process, process.stderr
        line = next(line for line in self.log if "event=listening" in line)
        listening = re.search(r" port=(\d+)", line)
        assert listening is not None
        self._client = http.client.HTTPConnection("127.0.0.1", int(listening[1]), timeout=10)

    def ask(self) -> None:
        self._client.request("GET", "/v2/health/live")
        answer = self._client.getresponse()
        answer.read()
        assert answer.status == 200

    def stop(self) -> None:
        self._client.close()
        self.process.send_signal(signal.SIGTERM)


@pytest.fixture
def chatty(ranker: Served) -> Iterator[Chatty]:
    command = [str(server_path()), "--model", str(ranker.package), "--port", "0", "--no-grpc"]
    command += ["--ops-library", str(ops_library_path()), "--log-level", "debug"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield Chatty(process)
        finally:
            process.kill()


def test_the_reader_of_the_log_may_go(chatty: Chatty) -> None:
    chatty.log.close()
    for _ in range(2):  # the first one's line in the log finds nobody
        chatty.ask()
    chatty.stop()
    assert chatty.process.wait(60) == 0


def lines_until_loss(chatty: Chatty, log: IO[str]) -> list[str]:
    lines: list[str] = []
    while not (lines and "event=log_lines_lost" in lines[-1]):
        if len(lines) % 50 == 0:
            chatty.ask()  # there is room for it
        lines.append(log.readline())
    return lines


def test_nobody_waits_for_the_reader_of_the_log(chatty: Chatty) -> None:
    num_requests = 3000  # of more lines than a pipe holds
    for _ in range(num_requests):
        chatty.ask()
    lines = lines_until_loss(chatty, chatty.log)
    lost = re.search(r" lines=(\d+)", lines[-1])
    assert lost is not None
    assert int(lost[1]) > 0
    assert int(lost[1]) + sum("event=request" in line for line in lines) >= num_requests
    chatty.stop()
    chatty.process.communicate(timeout=60)
    assert chatty.process.returncode == 0
