# SPDX-License-Identifier: Apache-2.0
"""Bad input, slow and vanished clients, limits and stops: the server says why and serves on."""

from __future__ import annotations

import gzip
import http.client
import json
import re
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.server.conftest import StartServer
from tests.server.serving import (
    DECODING,
    MAX_CANDIDATES,
    MAX_USERS,
    NUM_GENRES,
    WIRE_NAMES,
    Served,
    Server,
    eager,
    make_inputs,
    running,
    server_path,
    wait_until,
)

PATH = "/v2/models/ranker/infer"
HEADER = "Inference-Header-Content-Length"

Document = dict[str, Any]


def document(num_users: int = 2, num_candidates: int = 4) -> Document:
    """A valid request, with data as flat JSON."""
    return {
        "inputs": [
            {
                "name": name,
                "datatype": WIRE_NAMES[x.dtype.name],
                "shape": list(x.shape),
                "data": x.flatten().tolist(),
            }
            for name, x in make_inputs(num_users, num_candidates, seed=1).items()
        ]
    }


def post(server: Server, body: bytes | str, headers: dict[str, str] | None = None):
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    connection.request("POST", PATH, body, headers or {})
    response = connection.getresponse()
    text = response.read().decode()
    connection.close()
    return response.status, json.loads(text)


def assert_serves(server: Server, ranker: Served) -> None:
    """A good request gets its answer."""
    status, reply = post(server, json.dumps(document()))
    assert status == 200, reply
    score = next(x for x in reply["outputs"] if x["name"] == "score")
    expected = eager(ranker.module, make_inputs(2, 4, seed=1))["score"].flatten()
    assert score["data"] == pytest.approx(expected.tolist(), rel=1e-4, abs=1e-5)


def with_input(name: str, /, **changes: Any) -> str:
    changed = document()
    next(x for x in changed["inputs"] if x["name"] == name).update(changes)
    return json.dumps(changed)


def without_input(name: str) -> str:
    changed = document()
    changed["inputs"] = [x for x in changed["inputs"] if x["name"] != name]
    return json.dumps(changed)


def with_more(**fields: Any) -> str:
    return json.dumps(document() | fields)


BAD_REQUESTS: dict[str, tuple[str, str]] = {
    "no JSON": ("not json", "must be well formed"),
    "cut JSON": (json.dumps(document())[:-9], "must be well formed"),
    "empty body": ("", "must be well formed"),
    "missing tensor": (without_input("x_cand"), "input x_cand is missing"),
    "missing index": (without_input("cand_to_user"), "left out only when there is one user, got 2"),
    "unknown tensor": (with_input("genre", name="gender"), "input gender is unknown"),
    "tensor twice": (with_input("genre", name="x_cand"), "input x_cand must be given once"),
    "wrong dtype": (
        with_input("x_user", datatype="FP64"),
        "input x_user must have datatype FP32; got FP64",
    ),
    "wrong rank": (with_input("x_user", shape=[32]), "must have shape [-1, 16]; got [32]"),
    "wrong extent": (with_input("x_user", shape=[4, 8]), "must have shape [-1, 16]; got [4, 8]"),
    "wrong count": (with_input("is_new", data=[True]), "input is_new: data must have 4 values"),
    "wrong value": (with_input("genre", data=[1, 2, 2.5, 3]), "input genre: element 2"),
    "unequal rows": (with_input("genre", shape=[3], data=[1, 2, 3]), "input genre"),
    "id outside its table": (
        with_input("genre", data=[1, 2, 1 << 40, 3]),
        f"must have values in [0, {NUM_GENRES - 1}]; got {1 << 40} at position 2",
    ),
    "negative index": (with_input("cand_to_user", data=[0, 1, -1, 0]), "got -1 at position 2"),
    "index out of range": (with_input("cand_to_user", data=[0, 2, 1, 0]), "got 2 at position 1"),
    "too many users": (
        json.dumps(document(MAX_USERS + 1, 4)),
        f"a request's users must fill at most 1 runs (--max-request-runs) of {MAX_USERS}; "
        f"got {MAX_USERS + 1}",
    ),
    "too many candidates": (
        json.dumps(document(1, MAX_CANDIDATES + 1)),
        f"a request's candidates must fill at most 1 runs (--max-request-runs) of "
        f"{MAX_CANDIDATES}; got {MAX_CANDIDATES + 1}",
    ),
    "no users": (json.dumps(document(1, 0)).replace("[1, 16]", "[0, 16]"), "input x_user"),
    "user key of two": (
        with_more(parameters={"user_key": "ann"}),
        "parameter 'user_key' must come with one user; got 2 users",
    ),
    "user key as number": (with_more(parameters={"user_key": 7}), "must be a string; got 7"),
    "user key of 257 bytes": (
        with_more(parameters={"user_key": "x" * 257}),
        "must have at most 256 bytes; got 257",
    ),
    "unknown output": (with_more(outputs=[{"name": "rank"}]), "output rank is unknown"),
    "shared memory": (
        with_input("genre", parameters={"shared_memory_region": "r"}),
        "'shared_memory_region' is not supported",
    ),
}


@pytest.mark.parametrize("case", BAD_REQUESTS)
def test_bad_requests(server: Server, ranker: Served, case: str) -> None:
    body, text = BAD_REQUESTS[case]
    status, reply = post(server, body)
    assert status == 400
    assert reply.keys() == {"error"}
    assert "model ranker: " in reply["error"] and text in reply["error"]
    assert_serves(server, ranker)


@pytest.mark.parametrize(
    "declared, sent, text",
    [
        (24, 32, "must have binary_data_size 32"),
        (32, 31, "body has 31"),
        (32, 33, "1 bytes are left"),
    ],
)
def test_wrong_byte_counts(
    server: Server, ranker: Served, declared: int, sent: int, text: str
) -> None:
    changed = document()
    genre = next(x for x in changed["inputs"] if x["name"] == "genre")
    del genre["data"]
    genre["parameters"] = {"binary_data_size": declared}
    head = json.dumps(changed).encode()
    status, reply = post(server, head + bytes(sent), {HEADER: str(len(head))})
    assert status == 400 and text in reply["error"]
    assert_serves(server, ranker)


@pytest.mark.parametrize("value", ["x", "-1", "1000000", ""])
def test_wrong_header_length(server: Server, ranker: Served, value: str) -> None:
    status, reply = post(server, json.dumps(document()), {HEADER: value})
    assert status == 400 and "must be a number up to Content-Length" in reply["error"]
    assert_serves(server, ranker)


def test_body_over_the_limit(server: Server, ranker: Served) -> None:
    status, reply = post(server, bytes(5 << 20))
    assert status == 413
    assert "at most 4194304 bytes (--max-body-bytes); got 5242880" in reply["error"]
    assert_serves(server, ranker)


PACKED = gzip.compress(json.dumps(document()).encode())


@pytest.mark.parametrize(
    "coding, body, header, status, text",
    [
        ("gzip", b"no gzip at all", None, 400, "the body must be gzip data"),
        ("gzip", b"", None, 400, "or it is cut short"),
        ("gzip", PACKED[:-20], None, 400, "or it is cut short"),
        ("gzip", PACKED + b"more", None, 400, "4 bytes are left over"),
        ("deflate", PACKED, None, 400, "the body must be deflate data"),
        ("gzip", gzip.compress(bytes(5 << 20)), None, 413, "once unpacked (--max-body-bytes)"),
        ("gzip", PACKED, "4000000", 400, "at most the length of the body once unpacked"),
        ("br", b"x", None, 415, "packed as gzip or deflate; got Content-Encoding: br"),
    ],
    ids=["foreign", "empty", "cut", "trailing", "other format", "bomb", "json length", "unknown"],
)
def test_bad_compressed_bodies(
    server: Server, ranker: Served, coding: str, body: bytes, header, status: int, text: str
) -> None:
    headers = {"Content-Encoding": coding} | ({} if header is None else {HEADER: header})
    got, reply = post(server, body, headers)
    assert got == status and text in reply["error"], reply
    assert post(server, PACKED, {"Content-Encoding": "gzip"})[0] == 200
    assert_serves(server, ranker)


@pytest.mark.parametrize(
    "sent, status",
    [
        (b"\x00\x01\x02\x03 no HTTP at all\r\n\r\n", b"400"),
        (b"GET /v2 HTTP/1.1\r\nno field\r\n\r\n", b"400"),
        (b"GET /v2 HTTP/1.1\r\nContent-Length: -5\r\n\r\n", b"400"),
        (b"GET /v2 HTTP/1.1\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\n", b"400"),
        (b"GET /v2 HTTP/1.1\r\nContent-Length: 99999999999999999999\r\n\r\n", b"400"),
        (
            b"GET /v2 HTTP/1.1\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n",
            b"400",
        ),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"400"),
        (b"GET /v2 HTTP/1.1\r\nx: " + b"y" * 20000 + b"\r\n\r\n", b"431"),
    ],
)
def test_what_is_not_http(server: Server, ranker: Served, sent: bytes, status: bytes) -> None:
    with connect(server) as client:
        client.sendall(sent)
        assert receive_all(client).startswith(b"HTTP/1.1 " + status)
    assert_serves(server, ranker)


def connect(server: Server) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=30)


def receive_all(client: socket.socket) -> bytes:
    """Everything until the server closes."""
    return b"".join(iter(lambda: client.recv(65536), b""))


def request_bytes(**fields: str) -> bytes:
    body = json.dumps(document()).encode()
    lines = [f"POST {PATH} HTTP/1.1", "Host: x", f"Content-Length: {len(body)}"]
    lines += [f"{name}: {value}" for name, value in fields.items()]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


@pytest.mark.parametrize("size", [0.05, 0.9], ids=["head", "body"])
def test_slow_clients_are_dropped(server: Server, ranker: Served, size: float) -> None:
    sent = request_bytes()
    with connect(server) as client:
        client.sendall(sent[: int(len(sent) * size)])
        begin = time.monotonic()
        assert receive_all(client) == b""
        assert 0.5 < time.monotonic() - begin < 20
    assert_serves(server, ranker)


@pytest.mark.parametrize("begin", [0.02, 0.9], ids=["head", "body"])
def test_clients_that_trickle_are_dropped(server: Server, ranker: Served, begin: float) -> None:
    """--read-timeout-ms (1000) is for all of a head or a body, however many bytes keep coming."""
    sent = request_bytes()
    at = int(len(sent) * begin)
    with connect(server) as client:
        client.sendall(sent[:at])
        started = time.monotonic()
        with pytest.raises((ConnectionError, BrokenPipeError)):
            while time.monotonic() - started < 20:
                client.sendall(sent[at : at + 1])
                at += 1
                time.sleep(0.1)
        assert 0.5 < time.monotonic() - started < 20
    assert_serves(server, ranker)


@pytest.mark.parametrize("size", [0.05, 0.9], ids=["head", "body"])
def test_half_closed_clients_with_half_a_request_are_dropped(
    server: Server, ranker: Served, size: float
) -> None:
    sent = request_bytes()
    with connect(server) as client:
        client.sendall(sent[: int(len(sent) * size)])
        client.shutdown(socket.SHUT_WR)
        started = time.monotonic()
        assert receive_all(client) == b"" and time.monotonic() - started < 0.9
    assert_serves(server, ranker)


@pytest.mark.parametrize("end", [b"\r\n", b""], ids=["whole", "without end"])
def test_heads_of_too_many_fields_are_refused(server: Server, ranker: Served, end: bytes) -> None:
    with connect(server) as client:
        client.sendall(b"GET /v2 HTTP/1.1\r\n" + b"x: y\r\n" * 10_000 + end)
        assert receive_all(client).startswith(b"HTTP/1.1 431")
    assert_serves(server, ranker)


def test_what_two_readers_could_take_for_two_things(server: Server, ranker: Served) -> None:
    """Framing that a proxy may read otherwise: refused, and nothing behind it is a request."""
    smuggled = b"GET /v2/health/live HTTP/1.1\r\n\r\n"
    for fields in (
        b"Content-Length: 5\r\nContent-Length: 6",
        b"Content-Length: 5, 6",
        b"Content-Length: +5",
        b"Content-Length: 0x5",
        b"Content-Length: 5\r\nTransfer-Encoding: chunked",
        b"Transfer-Encoding: chunked\r\nContent-Length: 5",
        b"Transfer-Encoding : chunked",
        b"Transfer-Encoding: xchunked",
        b"Content-Length : 5",
    ):
        with connect(server) as client:
            client.sendall(b"POST " + PATH.encode() + b" HTTP/1.1\r\n" + fields + b"\r\n\r\n")
            client.sendall(smuggled)
            client.shutdown(socket.SHUT_WR)
            replies = receive_all(client)
        assert replies.startswith(b"HTTP/1.1 400"), (fields, replies)
        assert b'"live"' not in replies, fields
    assert_serves(server, ranker)


@pytest.mark.parametrize("size", [0.0, 0.05, 0.9, 1.0], ids=["idle", "head", "body", "reply"])
def test_vanished_clients_do_no_harm(server: Server, ranker: Served, size: float) -> None:
    sent = request_bytes()
    for _ in range(20):
        client = connect(server)
        client.sendall(sent[: int(len(sent) * size)])
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
        client.close()
    assert_serves(server, ranker)


def test_half_closed_clients_get_their_answers(server: Server) -> None:
    with connect(server) as client:
        client.sendall(request_bytes())
        client.shutdown(socket.SHUT_WR)
        reply = receive_all(client)
    assert reply.startswith(b"HTTP/1.1 200 OK") and b'"score"' in reply


def test_head_is_get_without_a_body(server: Server) -> None:
    client = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    for path in ("/v2/health/live", "/metrics", "/absent"):
        replies = {}
        for method in ("GET", "HEAD", "GET"):  # on one connection: nothing is left over
            client.request(method, path)
            replies[method] = client.getresponse()
            text = replies[method].read()
            assert bool(text) == (method == "GET")
        assert replies["HEAD"].status == replies["GET"].status
        if path != "/metrics":  # which count these requests, too
            assert replies["HEAD"].getheaders() == replies["GET"].getheaders()
    client.request("HEAD", PATH)
    assert client.getresponse().status == 405
    client.close()


def test_clients_of_http_1_0_hear_of_no_100(server: Server) -> None:
    head, body = request_bytes().split(b"\r\n\r\n", 1)
    head = head.replace(b"HTTP/1.1", b"HTTP/1.0") + b"\r\nExpect: 100-continue\r\n\r\n"
    with connect(server) as client:
        client.sendall(head)
        time.sleep(0.1)  # the head alone
        client.sendall(body)
        assert receive_all(client).startswith(b"HTTP/1.0 200 OK")


def test_pipelined_requests_are_answered_in_order(server: Server) -> None:
    with connect(server) as client:
        client.sendall(
            request_bytes() + b"GET /v2/health/live HTTP/1.1\r\nConnection: close\r\n\r\n"
        )
        replies = receive_all(client)
    assert replies.count(b"HTTP/1.1 200 OK") == 2
    assert replies.index(b'"outputs"') < replies.index(b'{"live":true}')


def test_replies_that_do_not_fit_into_the_socket_wait_for_the_client(server: Server) -> None:
    """Several megabytes of them, more than the kernel keeps for a connection."""
    number = 600
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8192)
        client.connect(("127.0.0.1", server.port))
        client.sendall(b"GET /metrics HTTP/1.1\r\n\r\n" * number)
        client.sendall(b"GET /v2/health/live HTTP/1.1\r\nConnection: close\r\n\r\n")
        time.sleep(0.5)
        assert can_connect(server), "others are served meanwhile"
        replies = receive_all(client)
    assert len(replies) > 8 << 20
    begin = 0
    for _ in range(number):
        body = replies.index(b"\r\n\r\n", begin) + 4
        head = replies[begin:body]
        assert head.startswith(b"HTTP/1.1 200 OK") and replies.startswith(b"# HELP", body)
        length = re.search(rb"Content-Length: (\d+)", head)
        assert length is not None
        begin = body + int(length[1])
    assert replies[begin:].endswith(b'\r\n\r\n{"live":true}')


def test_connection_limit(start_server: StartServer, ranker: Served) -> None:
    server = start_server("--max-connections", "2")
    first, second = connect(server), connect(server)
    for client in (first, second):
        client.sendall(b"GET /v2/health/live HTTP/1.1\r\n\r\n")
        assert client.recv(65536).startswith(b"HTTP/1.1 200")
    with connect(server) as third:
        reply = receive_all(third)
    assert reply.startswith(b"HTTP/1.1 503") and b"--max-connections" in reply
    first.close()
    second.close()
    wait_until(lambda: can_connect(server))
    assert_serves(server, ranker)


def can_connect(server: Server) -> bool:
    with connect(server) as client:
        client.sendall(b"GET /v2/health/live HTTP/1.1\r\nConnection: close\r\n\r\n")
        return client.recv(65536).startswith(b"HTTP/1.1 200")


def listens(server: Server) -> bool:
    try:
        connect(server).close()
    except ConnectionRefusedError:
        return False
    return True


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_stop_finishes_what_is_under_way(start_server: StartServer, number: signal.Signals) -> None:
    server = start_server()
    sent = request_bytes()
    with connect(server) as idle, connect(server) as busy:
        idle.sendall(b"GET /v2/health/live HTTP/1.1\r\n\r\n")
        assert idle.recv(65536).startswith(b"HTTP/1.1 200")
        busy.sendall(sent[:-100])
        time.sleep(0.2)
        server.send(number)
        assert idle.recv(65536) == b""
        wait_until(lambda: not listens(server))
        busy.sendall(sent[-100:])
        reply = receive_all(busy)
    assert reply.startswith(b"HTTP/1.1 200 OK") and b"Connection: close" in reply
    assert b'"score"' in reply
    assert server.wait() == 0, "".join(server.log)
    assert "event=stopped" in server.log[-1]


def test_stop_answers_a_request_that_runs(start_server: StartServer) -> None:
    server = start_server()
    body = json.dumps(document(1, MAX_CANDIDATES)).encode()
    with connect(server) as client:
        head = f"POST {PATH} HTTP/1.1\r\nContent-Length: {len(body)}\r\n\r\n"
        client.sendall(head.encode() + body)
        server.send(signal.SIGTERM)
        assert b"200 OK" in receive_all(client)
    assert server.wait() == 0, "".join(server.log)


def test_stop_gives_up_on_a_client_that_never_finishes(start_server: StartServer) -> None:
    server = start_server("--drain-timeout-ms", "200")
    with connect(server) as client:
        client.sendall(request_bytes()[:-100])
        time.sleep(0.2)
        server.send(signal.SIGTERM)
        assert server.wait() == 1
    assert "event=drain_timed_out" in server.log[-1]


def test_requests_share_a_budget_of_memory(start_server: StartServer, ranker: Served) -> None:
    body = json.dumps(document()).encode()
    limit = (1 + DECODING) * len(body) + 1000
    server = start_server("--max-request-memory", str(limit))
    with connect(server) as slow:
        slow.sendall(request_bytes()[:-100])  # holds its body's memory
        wait_until(lambda: post(server, body)[0] == 503)
        status, reply = post(server, body)
        assert status == 503
        left = limit - 2 * len(body)
        assert f"needs {DECODING * len(body)} bytes" in reply["error"]
        assert f"--max-request-memory {limit}) {left} bytes are left" in reply["error"]
        slow.sendall(request_bytes()[-100:])
        assert slow.recv(65536).startswith(b"HTTP/1.1 200")
    assert_serves(server, ranker)
    status, reply = post(server, gzip.compress(bytes(limit + 1)), {"Content-Encoding": "gzip"})
    assert status == 503 and f"needs {limit + 1} bytes" in reply["error"]
    assert_serves(server, ranker)


def test_who_sends_no_body_holds_no_memory(start_server: StartServer, ranker: Served) -> None:
    size = 4 << 20
    server = start_server("--max-request-memory", str((2 + DECODING) * size))
    head = f"POST {PATH} HTTP/1.1\r\nHost: x\r\n".encode()
    whole = head + f"Content-Length: {size}\r\n\r\n".encode()
    chunk = head + f"Transfer-Encoding: chunked\r\n\r\n{size:x}\r\n".encode()
    with ExitStack() as clients:
        silent = [clients.enter_context(connect(server)) for _ in range(10)]
        for i, client in enumerate(silent):
            client.sendall(whole if i < 5 else chunk)
        time.sleep(0.2)
        assert_serves(server, ranker)
        silent[0].sendall(b" " * size)  # a body of several steps
        assert silent[0].recv(65536).startswith(b"HTTP/1.1 400")
        for client in silent[1:4]:
            client.sendall(b" " * (size - 1))
        wait_until(lambda: post(server, b" " * size)[0] == 503)
    assert_serves(server, ranker)


@pytest.fixture
def foreign_file(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "foreign.pt2"
    path.write_bytes(b"PK no package")
    yield path


def run_to_end(*flags: str) -> tuple[int, str]:
    command = [str(server_path()), *flags]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    return ended.returncode, ended.stderr + ended.stdout


def test_failed_starts_say_why(foreign_file: Path, server: Server, ranker: Served) -> None:
    foreign = str(foreign_file)
    for flags, text in (
        ((), "--model or --model-repository is required"),
        (("--model", "absent.pt2"), "absent.pt2"),
        (("--model", foreign), foreign),
        (("--model", foreign, "--workers", "0"), "--workers"),
        (("--model", foreign, "--port", "70000"), "--port"),
        (("--model", foreign, "--port", "8001"), "--port, --grpc-port: must differ; got 8001"),
        (("--model", foreign, "--read-timeout-ms", "0"), "--read-timeout-ms: Value 0 not in range"),
        (("--model", foreign, "--unknown"), "--unknown"),
    ):
        status, output = run_to_end(*flags)
        assert status != 0 and text in output, output
    status, output = run_to_end("--check-config", "--model", foreign)
    assert status == 1 and foreign in output
    with running([ranker.package, ranker.package]) as twice:
        assert twice.wait() == 1
        assert "name and version must be unique" in twice.log[-1]
    with running([ranker.package], port=server.port) as second:
        assert second.wait() == 1
        assert "Address already in use" in second.log[-1]


def test_a_checked_configuration_is_printed_and_read_again(
    ranker: Served, foreign_file: Path, tmp_path: Path
) -> None:
    file = tmp_path / "ranker.conf"
    file.write_text(f"# one model\nmodel = {ranker.package}\nport = 0\ngrpc-port = 0\n")
    status, output = run_to_end("--config", str(file), "--check-config")
    assert status == 0
    assert re.match(r"# this process has [1-9]\d* cores and [1-9]\d* bytes of memory\n", output)
    assert f"\nmodel = {ranker.package}\n" in output
    assert "\nport = 0\n" in output and "\nmax-queue = 1024\n" in output
    file.write_text(output)
    assert run_to_end("--config", str(file), "--check-config") == (0, output)
    file.write_text(output + "prot = 1\n")
    status, output = run_to_end("--config", str(file), "--check-config")
    assert status != 0 and f"{file}:{len(file.read_text().splitlines())}: a key must" in output
