# SPDX-License-Identifier: Apache-2.0
"""One replica: an actor of Ray with an ikbo-server as its child."""

from __future__ import annotations

import logging
import re
import subprocess
import threading
from collections.abc import Sequence

import aiohttp
from starlette.requests import Request
from starlette.responses import Response

START_SECONDS = 300.0
STOP_SECONDS = 40.0  # longer than the server's own --drain-timeout-ms
# A replica that is killed takes its server along. (The signal is for the death of the thread that
# starts it: that of Ray for constructors, which lives as long as the actor.)
_DIE_WITH_PARENT = ("setpriv", "--pdeathsig", "KILL")
_LISTENING = re.compile(r"event=listening .*\bport=(\d+)")

# Of one connection only; and what the client of the child sets itself.
_OWN_HEADERS = {"connection", "content-length", "host", "keep-alive", "transfer-encoding"}

_log = logging.getLogger("ray.serve")


class ServerReplica:
    """Starts the server, hands requests to it as they are, and ends it.

    Args:
        command: ikbo-server with its flags but for the address, which is any free port of loopback.

    Errors:
        RuntimeError: the server ended, or was not ready in time; with its log.
    """

    def __init__(self, command: Sequence[str]) -> None:
        address = ["--host", "127.0.0.1", "--port", "0", "--no-grpc"]
        self._process = subprocess.Popen(
            [*_DIE_WITH_PARENT, *command, *address], stderr=subprocess.PIPE, text=True
        )
        self._last_lines: list[str] = []
        self._port = 0
        self._has_port = threading.Event()
        threading.Thread(target=self._read_log, daemon=True).start()
        self._has_port.wait(START_SECONDS)
        if self._port == 0:
            self._process.kill()
            raise RuntimeError(
                f"ikbo.ray: ikbo-server must be ready within {START_SECONDS:.0f} s; status "
                f"{self._process.wait()}, its last lines: {''.join(self._last_lines)}"
            )
        self._session: aiohttp.ClientSession | None = None

    def _read_log(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            _log.info(line.rstrip())
            self._last_lines = [*self._last_lines[-9:], line]
            if found := _LISTENING.search(line):
                self._port = int(found[1])
                self._has_port.set()
        self._has_port.set()

    def _client(self) -> aiohttp.ClientSession:
        """On the loop that serves requests."""
        if self._session is None:
            self._session = aiohttp.ClientSession(
                f"http://127.0.0.1:{self._port}",
                auto_decompress=False,
                connector=aiohttp.TCPConnector(limit=0),
                timeout=aiohttp.ClientTimeout(total=None),
                skip_auto_headers=("Accept-Encoding", "Content-Type", "User-Agent"),
            )
        return self._session

    async def __call__(self, request: Request) -> Response:
        path = request.scope["path"].removeprefix(request.scope.get("root_path", ""))
        if request.url.query:
            path += f"?{request.url.query}"
        headers = [(k, v) for k, v in request.headers.items() if k not in _OWN_HEADERS]
        body = await request.body()
        async with self._client().request(
            request.method, path or "/", data=body, headers=headers
        ) as answer:
            kept = {k: v for k, v in answer.headers.items() if k.lower() not in _OWN_HEADERS}
            kept["x-ikbo-replica"] = str(self._process.pid)
            return Response(await answer.read(), answer.status, kept)

    async def check_health(self) -> None:
        """Ray replaces the replica when it raises."""
        if self._process.poll() is not None:
            raise RuntimeError(f"ikbo.ray: ikbo-server ended with status {self._process.poll()}")
        async with self._client().get("/v2/health/live") as answer:
            answer.raise_for_status()

    def __del__(self) -> None:
        process = getattr(self, "_process", None)
        if process is not None and process.poll() is None:
            process.terminate()
            try:
                process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
