# SPDX-License-Identifier: Apache-2.0
"""TLS and mutual TLS on both protocols, with certificates made here."""

from __future__ import annotations

import http.client
import json
import re
import signal
import socket
import ssl
import subprocess
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http
from tritonclient.utils import InferenceServerException

from tests.server.serving import Served, Server, eager, running, server_path

ARRAYS = {"x": np.arange(4 * 4096, dtype=np.float32).reshape(4096, 4)}


@dataclass(frozen=True)
class Pair:
    """A certificate and its key."""

    certificate: Path
    key: Path


def openssl(*arguments: str | Path) -> None:
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True)


def make_authority(folder: Path, name: str) -> Pair:
    pair = Pair(folder / f"{name}.crt", folder / f"{name}.key")
    openssl(
        *("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"),
        *("-subj", f"/CN={name}", "-days", "2", "-keyout", pair.key, "-out", pair.certificate),
    )
    return pair


def make_signed(folder: Path, name: str, authority: Pair, extension: str, *, days: int = 2) -> Pair:
    pair = Pair(folder / f"{name}.crt", folder / f"{name}.key")
    request, extensions = folder / f"{name}.csr", folder / f"{name}.ext"
    extensions.write_text(extension)
    openssl(
        *("req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"),
        *("-subj", f"/CN={name}", "-keyout", pair.key, "-out", request),
    )
    openssl(
        *("x509", "-req", "-in", request, "-CA", authority.certificate, "-CAkey", authority.key),
        *("-CAcreateserial", "-days", str(days), "-extfile", extensions, "-out", pair.certificate),
    )
    return pair


@dataclass(frozen=True)
class Certificates:
    authority: Pair
    server: Pair
    client: Pair
    stranger: Pair  # signed by an authority that the server does not know

    def server_flags(self) -> list[str]:
        return ["--tls-cert", str(self.server.certificate), "--tls-key", str(self.server.key)]


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    folder = tmp_path_factory.mktemp("certificates")
    authority, other = make_authority(folder, "authority"), make_authority(folder, "other")
    return Certificates(
        authority,
        make_signed(folder, "server", authority, "subjectAltName=IP:127.0.0.1,DNS:localhost"),
        make_signed(folder, "client", authority, "extendedKeyUsage=clientAuth"),
        make_signed(folder, "stranger", other, "extendedKeyUsage=clientAuth"),
    )


@pytest.fixture(scope="module")
def server(plain: Served, certificates: Certificates) -> Iterator[Server]:
    with running([plain.package], *certificates.server_flags()) as shared:
        yield shared
        shared.send(signal.SIGTERM)
        assert shared.wait() == 0, "".join(shared.log)


@pytest.fixture(scope="module")
def mutual(plain: Served, certificates: Certificates) -> Iterator[Server]:
    ca = ["--tls-client-ca", str(certificates.authority.certificate)]
    with running([plain.package], *certificates.server_flags(), *ca) as shared:
        yield shared


def context(certificates: Certificates, pair: Pair | None = None) -> ssl.SSLContext:
    made = ssl.create_default_context(cafile=certificates.authority.certificate)
    if pair is not None:
        made.load_cert_chain(pair.certificate, pair.key)
    return made


def https(server: Server, tls: ssl.SSLContext) -> http.client.HTTPSConnection:
    return http.client.HTTPSConnection("127.0.0.1", server.port, context=tls, timeout=30)


def credentials(certificates: Certificates, pair: Pair | None = None) -> grpc.ChannelCredentials:
    return grpc.ssl_channel_credentials(
        certificates.authority.certificate.read_bytes(),
        None if pair is None else pair.key.read_bytes(),
        None if pair is None else pair.certificate.read_bytes(),
    )


def grpc_client(server: Server, made: grpc.ChannelCredentials) -> triton_grpc.InferenceServerClient:
    return triton_grpc.InferenceServerClient(server.grpc_address, ssl=True, creds=made)


def assert_infers(client, module: type, plain: Served) -> None:
    tensor = module.InferInput("x", [4096, 4], "FP32")
    tensor.set_data_from_numpy(ARRAYS["x"])
    for _ in range(2):  # on one connection
        score = client.infer("plain", [tensor]).as_numpy("score")
        expected = eager(plain.module, ARRAYS)["score"]
        np.testing.assert_allclose(score, expected, rtol=1e-4, atol=1e-3)


def test_http_over_tls(server: Server, plain: Served, certificates: Certificates) -> None:
    with triton_http.InferenceServerClient(
        server.address,
        ssl=True,
        ssl_options={"ca_certs": str(certificates.authority.certificate)},
    ) as client:
        assert client.is_server_ready()
        assert_infers(client, triton_http, plain)


def test_grpc_over_tls(server: Server, plain: Served, certificates: Certificates) -> None:
    with grpc_client(server, credentials(certificates)) as client:
        assert client.is_server_ready()
        assert_infers(client, triton_grpc, plain)


def test_curl_over_tls(server: Server, certificates: Certificates) -> None:
    command = ["curl", "-sS", "--compressed", "--cacert", str(certificates.authority.certificate)]
    ended = subprocess.run(
        [*command, f"https://127.0.0.1:{server.port}/v2/models/plain"],
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0 and ended.stderr == ""
    assert json.loads(ended.stdout)["name"] == "plain"


def test_clients_that_do_not_trust_the_authority_stay_away(
    server: Server, certificates: Certificates
) -> None:
    with pytest.raises(ssl.SSLCertVerificationError):
        https(server, ssl.create_default_context()).request("GET", "/v2")
    with (
        grpc_client(server, grpc.ssl_channel_credentials()) as client,
        pytest.raises(InferenceServerException, match="UNAVAILABLE"),
    ):
        client.is_server_live(client_timeout=10)
    connection = https(server, context(certificates))
    connection.request("GET", "/v2/health/live")
    assert connection.getresponse().status == 200


def failed_handshakes(server: Server, certificates: Certificates) -> int:
    connection = https(server, context(certificates))
    connection.request("GET", "/metrics")
    text = connection.getresponse().read().decode()
    counted = re.search(r'ikbo_errors_total\{kind="tls_handshake"\} (\d+)', text)
    assert counted
    return int(counted[1])


def test_what_is_no_tls_is_dropped(server: Server, certificates: Certificates) -> None:
    before = failed_handshakes(server, certificates)
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as plain_client:
        plain_client.sendall(b"GET /v2 HTTP/1.1\r\nHost: x\r\n\r\n")
        assert not plain_client.recv(65536).startswith(b"HTTP/")
    assert failed_handshakes(server, certificates) == before + 1


def test_old_protocol_versions_are_refused(server: Server, certificates: Certificates) -> None:
    old = context(certificates)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        old.minimum_version = ssl.TLSVersion.TLSv1_1
        old.maximum_version = ssl.TLSVersion.TLSv1_1
    old.set_ciphers("DEFAULT:@SECLEVEL=0")
    with pytest.raises(ssl.SSLError):
        https(server, old).request("GET", "/v2")


def test_a_session_ends_with_a_notice(server: Server, certificates: Certificates) -> None:
    tls = context(certificates)
    with (
        socket.create_connection(("127.0.0.1", server.port), timeout=30) as raw,
        tls.wrap_socket(raw, server_hostname="127.0.0.1") as client,
    ):
        client.sendall(b"GET /v2 HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        # An end without TLS's notice would raise SSLEOFError.
        reply = b"".join(iter(lambda: client.recv(65536), b""))
    assert b"200 OK" in reply


def test_mutual_tls(mutual: Server, plain: Served, certificates: Certificates) -> None:
    connection = https(mutual, context(certificates, certificates.client))
    for _ in range(2):
        connection.request("GET", "/v2/models/plain/ready")
        response = connection.getresponse()
        assert response.status == 200 and json.loads(response.read())["ready"]
    with grpc_client(mutual, credentials(certificates, certificates.client)) as client:
        assert_infers(client, triton_grpc, plain)


@pytest.mark.parametrize("who", ["nobody", "stranger"])
def test_mutual_tls_refuses(mutual: Server, certificates: Certificates, who: str) -> None:
    pair = None if who == "nobody" else certificates.stranger
    with pytest.raises((ssl.SSLError, ConnectionError)):
        connection = https(mutual, context(certificates, pair))
        connection.request("GET", "/v2")
        connection.getresponse()
    with (
        grpc_client(mutual, credentials(certificates, pair)) as client,
        pytest.raises(InferenceServerException, match="UNAVAILABLE"),
    ):
        client.is_server_live(client_timeout=10)
    connection = https(mutual, context(certificates, certificates.client))
    connection.request("GET", "/v2/health/live")
    assert connection.getresponse().status == 200


def test_unusable_certificates_are_named(
    plain: Served, certificates: Certificates, tmp_path: Path
) -> None:
    foreign = tmp_path / "foreign.pem"
    foreign.write_text("no certificate\n")
    certificate, key = str(certificates.server.certificate), str(certificates.server.key)
    for flags, text in (
        (["--tls-cert", certificate], "--tls-key"),
        (["--tls-key", key], "--tls-cert"),
        (["--tls-client-ca", certificate], "--tls-cert"),
        (["--tls-cert", str(foreign), "--tls-key", key], str(foreign)),
        (["--tls-cert", certificate, "--tls-key", str(foreign)], str(foreign)),
        # the key of another certificate
        (["--tls-cert", certificate, "--tls-key", str(certificates.client.key)], "client.key"),
        (["--tls-cert", "absent.pem", "--tls-key", key], "absent.pem"),
    ):
        with running([plain.package], *flags) as failed:
            assert failed.wait() != 0
            assert text in "".join(failed.log), failed.log


def test_a_certificate_that_has_ended_is_warned_of(
    plain: Served, certificates: Certificates, tmp_path: Path
) -> None:
    name = "subjectAltName=IP:127.0.0.1"
    ended = make_signed(tmp_path, "ended", certificates.authority, name, days=0)
    time.sleep(1.1)  # it ends with the second in which it was made
    for pair, is_warned_of in ((ended, True), (certificates.server, False)):
        command = [str(server_path()), "--model", str(plain.package), "--check-config"]
        command += ["--tls-cert", str(pair.certificate), "--tls-key", str(pair.key)]
        log = subprocess.run(command, capture_output=True, text=True, check=True).stderr
        assert ("event=certificate_not_current" in log) == is_warned_of, log
