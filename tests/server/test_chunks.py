# SPDX-License-Identifier: Apache-2.0
"""Request bodies in chunks, good and bad."""

from __future__ import annotations

import gzip
import http.client
import json
import socket
import time

import pytest

from tests.server.conftest import StartServer
from tests.server.serving import (
    DECODING,
    Served,
    Server,
    eager,
    make_inputs,
)
from tests.server.test_faults import (
    HEADER,
    PACKED,
    PATH,
    assert_serves,
    connect,
    document,
    receive_all,
)


def chunked(*chunks: bytes, last: bytes = b"0\r\n\r\n", **fields: str) -> bytes:
    """A request with these chunks."""
    lines = [f"POST {PATH} HTTP/1.1", "Transfer-Encoding: chunked"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in fields.items()]
    body = b"".join(b"%x\r\n%s\r\n" % (len(chunk), chunk) for chunk in chunks)
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body + last


def pieces(body: bytes, size: int) -> list[bytes]:
    return [body[at : at + size] for at in range(0, len(body), size)]


def test_bodies_in_chunks(server: Server, ranker: Served) -> None:
    """Of any size of chunk, packed, with extensions and trailers, and pipelined."""
    body = json.dumps(document()).encode()
    sent = b"".join(
        [
            chunked(*pieces(body, 1)),
            chunked(*pieces(body, 1000), last=b"0\r\nX-Trailer: 1\r\n\r\n"),
            chunked(*pieces(PACKED, 7), Content_Encoding="gzip"),
            chunked(body).replace(b"\r\n\r\n", b"\r\n\r\n1;x=y\r\n \r\n", 1),
            b"GET /v2/health/live HTTP/1.1\r\nConnection: close\r\n\r\n",
        ]
    )
    with connect(server) as client:
        client.sendall(sent)
        replies = receive_all(client)
    assert replies.count(b"HTTP/1.1 200 OK") == 5, replies
    assert replies.count(b'"score"') == 4
    assert_serves(server, ranker)


def test_binary_tensors_in_chunks(server: Server, ranker: Served) -> None:
    changed = document()
    genre = next(x for x in changed["inputs"] if x["name"] == "genre")
    data = b"".join(value.to_bytes(8, "little") for value in genre.pop("data"))
    genre["parameters"] = {"binary_data_size": len(data)}
    head = json.dumps(changed).encode()
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    headers = {HEADER: str(len(head))}
    connection.request("POST", PATH, iter([head, data]), headers, encode_chunked=True)
    response = connection.getresponse()
    score = next(x for x in json.loads(response.read())["outputs"] if x["name"] == "score")
    expected = eager(ranker.module, make_inputs(2, 4, seed=1))["score"].flatten()
    assert score["data"] == pytest.approx(expected.tolist(), rel=1e-4, abs=1e-5)
    headers = {HEADER: str(len(head) + len(data) + 1)}
    connection.request("POST", PATH, iter([head, data]), headers, encode_chunked=True)
    response = connection.getresponse()
    assert response.status == 400
    assert "at most the length of the body" in json.loads(response.read())["error"]
    connection.close()


@pytest.mark.parametrize(
    "sent, status, text",
    [
        (chunked(last=b"x\r\n"), b"400", b"must come in chunks"),
        (chunked(last=b"-1\r\n\r\n"), b"400", b"must come in chunks"),
        (chunked(last=b"3\r\nabcdef\r\n"), b"400", b"must come in chunks"),
        (chunked(last=b"f" * 17 + b"\r\n"), b"400", b"must come in chunks"),
        (chunked(last=b"1;" + b"x" * (1 << 18)), b"400", b"must come in chunks"),
        (chunked(last=b"0\r\n" + b"x: y\r\n" * (1 << 15)), b"400", b"must come in chunks"),
        (chunked(last=b"ffffffffffffffff\r\n"), b"413", b"(--max-body-bytes)"),
        (chunked(bytes(4 << 20), b"x"), b"413", b"(--max-body-bytes)"),
        (chunked(gzip.compress(bytes(5 << 20)), Content_Encoding="gzip"), b"413", b"unpacked"),
        (chunked(b"{}", transfer_encoding="chunked"), b"400", b"bad Transfer-Encoding"),
        (
            b"POST /v2 HTTP/1.1\r\nTransfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
            b"400",
            b"Transfer-Encoding must be chunked; got gzip, chunked",
        ),
        (
            b"POST /v2 HTTP/1.1\r\nTransfer-Encoding: gzip\r\n\r\n",
            b"400",
            b"Transfer-Encoding must be chunked; got gzip",
        ),
    ],
    ids=[
        "no number",
        "negative",
        "too long",
        "overflow",
        "endless extension",
        "endless trailer",
        "huge",
        "sum",
        "bomb",
        "twice",
        "packed chunks",
        "no chunks",
    ],
)
def test_bad_chunks(
    server: Server, ranker: Served, sent: bytes, status: bytes, text: bytes
) -> None:
    with connect(server) as client:
        client.sendall(sent)
        client.shutdown(socket.SHUT_WR)
        reply = receive_all(client)
    assert reply.startswith(b"HTTP/1.1 " + status) and text in reply, reply
    assert_serves(server, ranker)


def test_chunks_that_stop_are_dropped(server: Server, ranker: Served) -> None:
    """The time for a body is for all its chunks: a drop now and then wins no more of it."""
    with connect(server) as client:
        client.sendall(chunked(b"{", last=b""))
        begin = time.monotonic()
        for _ in range(100):
            try:
                client.sendall(b"1\r\n \r\n")
            except OSError:
                break
            time.sleep(0.1)
        assert 0.5 < time.monotonic() - begin < 8
    with connect(server) as client:
        client.sendall(chunked(b"{", last=b""))
        client.shutdown(socket.SHUT_WR)
        assert receive_all(client) == b""
    assert_serves(server, ranker)


def test_chunks_share_the_budget_of_memory(start_server: StartServer, ranker: Served) -> None:
    body = json.dumps(document()).encode()
    limit = (1 + DECODING) * len(body) + 1000
    server = start_server("--max-request-memory", str(limit))
    with connect(server) as client:
        client.sendall(chunked(body + b" " * (limit - len(body) + 500)))
        reply = receive_all(client)
    assert reply.startswith(b"HTTP/1.1 503") and b"--max-request-memory" in reply
    with connect(server) as client:
        client.sendall(chunked(*pieces(body, 100)))
        assert client.recv(65536).startswith(b"HTTP/1.1 200")
    assert_serves(server, ranker)
