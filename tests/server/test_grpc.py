# SPDX-License-Identifier: Apache-2.0
"""gRPC as clients use it: the unmodified tritonclient, gRPC's own health and reflection clients."""

from __future__ import annotations

import contextlib
import queue
import re
import signal
import socket
import struct
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton
from google.protobuf import descriptor_pb2
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)
from tritonclient.grpc import service_pb2, service_pb2_grpc
from tritonclient.utils import InferenceServerException

from tests.server.conftest import StartServer
from tests.server.serving import (
    MAX_CANDIDATES,
    MAX_USERS,
    REPOSITORY,
    WIRE_NAMES,
    Arrays,
    Served,
    Server,
    eager,
    make_inputs,
)

SERVICE = "inference.GRPCInferenceService"
FIELDS = {
    "FP32": "fp32_contents",
    "INT64": "int64_contents",
    "INT32": "int_contents",
    "BOOL": "bool_contents",
}


def infer_inputs(inputs: Arrays) -> list[triton.InferInput]:
    described = []
    for name, x in inputs.items():
        described.append(triton.InferInput(name, list(x.shape), WIRE_NAMES[x.dtype.name]))
        described[-1].set_data_from_numpy(x)
    return described


def typed_request(inputs: Arrays) -> service_pb2.ModelInferRequest:
    """The request with its elements in typed contents."""
    request = service_pb2.ModelInferRequest(model_name="ranker", id="typed")
    for name, x in inputs.items():
        datatype = WIRE_NAMES[x.dtype.name]
        tensor = request.inputs.add(name=name, datatype=datatype, shape=x.shape)
        getattr(tensor.contents, FIELDS[datatype]).extend(x.flatten().tolist())
    return request


def assert_answer(result: triton.InferResult, module, inputs: Arrays, names=None) -> None:
    expected = eager(module, inputs)
    for name in names or expected:
        np.testing.assert_allclose(result.as_numpy(name), expected[name], rtol=1e-4, atol=1e-5)


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[triton.InferenceServerClient]:
    with triton.InferenceServerClient(server.grpc_address) as client:
        yield client


@pytest.fixture(scope="module")
def channel(server: Server) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(server.grpc_address) as channel:
        yield channel


@pytest.fixture(scope="module")
def stub(channel: grpc.Channel) -> service_pb2_grpc.GRPCInferenceServiceStub:
    return service_pb2_grpc.GRPCInferenceServiceStub(channel)


def test_health_and_metadata(client: triton.InferenceServerClient) -> None:
    assert client.is_server_live() and client.is_server_ready()
    assert client.is_model_ready("ranker") and client.is_model_ready("ranker", "3")
    assert not client.is_model_ready("ranker", "4") and not client.is_model_ready("other")
    server = client.get_server_metadata()
    assert (server.name, list(server.extensions)) == ("ikbo-server", ["binary_tensor_data"])
    metadata = client.get_model_metadata("ranker", "3")
    assert list(metadata.versions) == ["3"] and metadata.platform == "pytorch_aotinductor"
    assert [(x.name, x.datatype, list(x.shape)) for x in metadata.inputs] == [
        ("x_user", "FP32", [-1, 16]),
        ("x_cand", "FP32", [-1, 48]),
        ("genre", "INT64", [-1]),
        ("is_new", "BOOL", [-1]),
        ("cand_to_user", "INT32", [-1]),
    ]
    assert [x.name for x in metadata.outputs] == ["score", "profile"]


def test_roles_and_ranges_are_in_the_metadata(pool: DescriptorPool, channel) -> None:
    # The field `properties` is the public protocol's; tritonclient's messages lack it.
    described = pool.FindMessageTypeByName("inference.ModelMetadataResponse")
    call = channel.unary_unary(
        f"/{SERVICE}/ModelMetadata",
        service_pb2.ModelMetadataRequest.SerializeToString,
        GetMessageClass(described).FromString,
    )
    properties = call(service_pb2.ModelMetadataRequest(name="ranker")).properties
    assert properties["max_users"] == str(MAX_USERS)
    assert properties["max_candidates"] == str(MAX_CANDIDATES)
    assert properties["input.x_user.role"] == "user"
    assert properties["input.cand_to_user.role"] == "index"
    assert properties["output.score.role"] == "candidate"


@pytest.mark.parametrize("num_users, num_candidates", [(1, 1), (1, 37), (3, 100), (8, 5), (2, 0)])
def test_raw_contents(client, ranker: Served, num_users: int, num_candidates: int) -> None:
    inputs = make_inputs(num_users, num_candidates, seed=num_candidates)
    result = client.infer("ranker", infer_inputs(inputs), request_id="request 7")
    assert_answer(result, ranker.module, inputs)
    response = result.get_response()
    assert (response.id, response.model_version) == ("request 7", "3")
    assert len(response.raw_output_contents) == 2


@pytest.mark.parametrize("num_users, num_candidates", [(1, 3), (3, 100)])
def test_typed_contents(stub, ranker: Served, num_users: int, num_candidates: int) -> None:
    inputs = make_inputs(num_users, num_candidates, seed=num_candidates)
    response = stub.ModelInfer(typed_request(inputs))
    assert response.id == "typed" and not response.raw_output_contents
    expected = eager(ranker.module, inputs)
    for output in response.outputs:
        got = np.reshape(output.contents.fp32_contents, output.shape)
        np.testing.assert_allclose(got, expected[output.name], rtol=1e-4, atol=1e-5)


def test_outputs_are_the_ones_asked_for(client, ranker: Served) -> None:
    inputs = make_inputs(2, 9, seed=1)
    wanted = [triton.InferRequestedOutput(name) for name in ("profile", "score")]
    both = client.infer("ranker", infer_inputs(inputs), outputs=wanted)
    assert [x.name for x in both.get_response().outputs] == ["profile", "score"]
    assert_answer(both, ranker.module, inputs)
    one = client.infer("ranker", infer_inputs(inputs), outputs=wanted[:1])
    assert [x.name for x in one.get_response().outputs] == ["profile"]


def test_one_user_needs_no_index(client, ranker: Served) -> None:
    inputs = make_inputs(1, 20, seed=2)
    without = {name: x for name, x in inputs.items() if name != "cand_to_user"}
    assert_answer(client.infer("ranker", infer_inputs(without)), ranker.module, inputs)


@pytest.mark.parametrize("algorithm", ["gzip", "deflate"])
def test_compressed_messages(client, ranker: Served, algorithm: str) -> None:
    inputs = make_inputs(2, 50, seed=3)
    result = client.infer("ranker", infer_inputs(inputs), compression_algorithm=algorithm)
    assert_answer(result, ranker.module, inputs)


def test_async_calls(client, ranker: Served) -> None:
    cases = [make_inputs(1 + i % 3, 10 + i, seed=i) for i in range(20)]
    answers: queue.Queue = queue.Queue()

    def call(i: int) -> None:
        client.async_infer(
            "ranker",
            infer_inputs(cases[i]),
            lambda result, error: answers.put((i, result, error)),
        )

    for i in range(len(cases)):
        call(i)
    for _ in cases:
        i, result, error = answers.get(timeout=60)
        assert error is None
        assert_answer(result, ranker.module, cases[i])


def test_many_clients_get_their_own_answers(server: Server, ranker: Served) -> None:
    def ask(number: int) -> None:
        with triton.InferenceServerClient(server.grpc_address) as own:
            for i in range(10):
                inputs = make_inputs(
                    1 + (number + i) % 3, 50 + 7 * number + i, seed=91 * number + i
                )
                result = own.infer("ranker", infer_inputs(inputs), request_id=f"{number} {i}")
                assert result.get_response().id == f"{number} {i}"
                assert_answer(result, ranker.module, inputs)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(ask, range(4)))


def refusal(call) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.RpcError) as caught:
        call()
    return caught.value.code(), caught.value.details()


def raw_request(inputs: Arrays) -> service_pb2.ModelInferRequest:
    request = service_pb2.ModelInferRequest(model_name="ranker")
    for name, x in inputs.items():
        request.inputs.add(name=name, datatype=WIRE_NAMES[x.dtype.name], shape=x.shape)
        request.raw_input_contents.append(x.tobytes())
    return request


def test_refusals_name_what_is_wrong(stub, ranker: Served) -> None:
    inputs = make_inputs(2, 4, seed=1)
    bad = grpc.StatusCode.INVALID_ARGUMENT

    def check(request, code: grpc.StatusCode, text: str) -> None:
        got = refusal(lambda: stub.ModelInfer(request))
        assert got[0] == code and text in got[1], got

    request = raw_request(inputs)
    request.model_name = "other"
    check(request, grpc.StatusCode.NOT_FOUND, "there is no model 'other' here")
    request = raw_request(inputs)
    request.model_version = "9"
    check(request, grpc.StatusCode.NOT_FOUND, "model ranker has no version '9' here")
    request = raw_request(inputs)
    request.model_name = "\u00e9" * 100_000
    check(request, grpc.StatusCode.NOT_FOUND, "there is no model '\u00e9")
    request = raw_request(inputs)
    del request.raw_input_contents[4]
    check(request, bad, "one element for each of the 5 inputs; got 4")
    request = raw_request(inputs)
    request.raw_input_contents[2] = request.raw_input_contents[2][:-1]
    check(request, bad, "input genre must have 32 bytes in raw_input_contents (INT64 [4]); got 31")
    request = raw_request(inputs)
    request.inputs[0].contents.fp32_contents.append(1)
    check(request, bad, "input x_user must have either contents or raw_input_contents; got both")
    request = raw_request(inputs)
    request.inputs[2].datatype = "FP64"
    check(request, bad, "input genre must have datatype INT64; got FP64")
    request = raw_request(inputs)
    request.inputs[0].shape[:] = [4, 8]
    check(request, bad, "input x_user must have shape [-1, 16]; got [4, 8]")
    request = raw_request(
        make_inputs(2, 4, seed=1) | {"cand_to_user": np.array([0, 1, 2, 0], "i4")}
    )
    check(request, bad, "got 2 at position 2")
    request = raw_request(inputs)
    request.inputs[1].parameters["shared_memory_region"].string_param = "r"
    check(request, bad, "'shared_memory_region' is not supported")
    request = raw_request(inputs)
    request.outputs.add(name="rank")
    check(request, bad, "output rank is unknown; it must be one of score, profile")
    request = raw_request(inputs)
    request.parameters["user_key"].string_param = "ann"
    check(request, bad, "parameter 'user_key' must come with one user; got 2 users")
    request = typed_request(inputs)
    request.inputs[2].contents.int64_contents.append(1)
    check(request, bad, "input genre must have 4 values in int64_contents")
    request = typed_request(inputs)
    request.inputs[2].contents.int_contents.append(1)
    check(request, bad, "got 4 there and 1 in other fields")
    inputs["genre"][1] = 99
    check(raw_request(inputs), bad, "got 99 at position 1")


def test_bytes_that_are_no_message_are_refused(channel, stub) -> None:
    call = channel.unary_unary(f"/{SERVICE}/ModelInfer")
    code, text = refusal(lambda: call(b"\xff\xff\xff\xff no message"))
    assert code == grpc.StatusCode.INVALID_ARGUMENT and "must be an inference.ModelInfer" in text
    assert stub.ServerLive(service_pb2.ServerLiveRequest()).live


def test_a_message_over_the_limit_is_refused(stub) -> None:
    # The shared server takes 4 MiB.
    request = service_pb2.ModelInferRequest(
        model_name="ranker", raw_input_contents=[bytes(5 << 20)]
    )
    code, _ = refusal(lambda: stub.ModelInfer(request))
    assert code == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert stub.ServerLive(service_pb2.ServerLiveRequest()).live


def test_streams_and_unknown_methods_are_refused_by_name(client, channel) -> None:
    answers: queue.Queue = queue.Queue()
    client.start_stream(lambda result, error: answers.put((result, error)))
    result, error = answers.get(timeout=60)
    client.stop_stream()
    assert result is None and isinstance(error, InferenceServerException)
    assert error.status() == "StatusCode.UNIMPLEMENTED" and "ModelStreamInfer" in error.message()
    with pytest.raises(InferenceServerException, match="ModelConfig") as refused:
        client.get_model_config("ranker")
    assert refused.value.status() == "StatusCode.UNIMPLEMENTED"
    code, text = refusal(lambda: channel.unary_unary("/some.Other/Method")(b""))
    assert code == grpc.StatusCode.UNIMPLEMENTED and "/some.Other/Method" in text
    assert client.is_server_live()


@pytest.mark.parametrize("service", ["", SERVICE])
def test_health_service(channel, service: str) -> None:
    stub = health_pb2_grpc.HealthStub(channel)
    status = stub.Check(health_pb2.HealthCheckRequest(service=service)).status
    assert status == health_pb2.HealthCheckResponse.SERVING
    code, _ = refusal(lambda: stub.Check(health_pb2.HealthCheckRequest(service="other")))
    assert code == grpc.StatusCode.NOT_FOUND


@pytest.fixture(scope="module")
def pool(channel: grpc.Channel) -> DescriptorPool:
    """What the reflection service describes."""
    return DescriptorPool(ProtoReflectionDescriptorDatabase(channel))


def test_reflection_describes_the_service(pool: DescriptorPool, channel) -> None:
    services = ProtoReflectionDescriptorDatabase(channel).get_services()
    assert {SERVICE, "grpc.health.v1.Health"} <= set(services)
    methods = pool.FindServiceByName(SERVICE).methods_by_name
    assert set(methods) >= {"ServerLive", "ServerReady", "ModelReady", "ModelInfer"}
    assert methods["ModelInfer"].input_type.fields_by_name["raw_input_contents"].number == 7


# What the public protocol has and tritonclient's descriptors lack.
OURS_ALONE = {"ModelMetadataResponse.properties", "ModelMetadataResponse.PropertiesEntry"}


def messages(
    described: list[descriptor_pb2.DescriptorProto], prefix: str = ""
) -> dict[str, descriptor_pb2.DescriptorProto]:
    found = {}
    for message in described:
        found[prefix + message.name] = message
        found |= messages(list(message.nested_type), f"{prefix}{message.name}.")
    return found


def test_field_numbers_are_the_public_ones(tmp_path: Path) -> None:
    folder = REPOSITORY / "src/server"
    out = tmp_path / "ours"
    subprocess.run(
        ["protoc", f"--proto_path={folder}", f"--descriptor_set_out={out}", "open_inference.proto"],
        check=True,
    )
    (ours,) = descriptor_pb2.FileDescriptorSet.FromString(out.read_bytes()).file
    theirs = descriptor_pb2.FileDescriptorProto()
    service_pb2.DESCRIPTOR.CopyToProto(theirs)
    assert (ours.package, ours.syntax) == (theirs.package, theirs.syntax)
    their_messages = messages(list(theirs.message_type))
    for name, message in messages(list(ours.message_type)).items():
        if name in OURS_ALONE:
            continue
        fields = {
            (x.name, x.number, x.type, x.label, x.type_name, x.HasField("oneof_index"))
            for x in message.field
            if f"{name}.{x.name}" not in OURS_ALONE
        }
        expected = {
            (x.name, x.number, x.type, x.label, x.type_name, x.HasField("oneof_index"))
            for x in their_messages[name].field
        }
        assert fields == expected, name
    their_methods = {x.name: x for x in theirs.service[0].method}
    assert ours.service[0].name == theirs.service[0].name
    assert len(ours.service[0].method) == 9
    for method in ours.service[0].method:
        expected_method = their_methods[method.name]
        assert method.input_type == expected_method.input_type
        assert method.output_type == expected_method.output_type
        assert not expected_method.server_streaming and not method.server_streaming


def test_stop_answers_a_call_that_runs(start_server: StartServer, ranker: Served) -> None:
    server = start_server()
    inputs = make_inputs(1, MAX_CANDIDATES, seed=6)
    with triton.InferenceServerClient(server.grpc_address) as own:
        answers: queue.Queue = queue.Queue()
        for _ in range(3):
            own.async_infer(
                "ranker", infer_inputs(inputs), lambda result, error: answers.put((result, error))
            )
        first, error = answers.get(timeout=60)
        assert error is None, error
        server.send(signal.SIGTERM)
        assert_answer(first, ranker.module, inputs)
        for _ in range(2):
            result, error = answers.get(timeout=60)
            assert error is None, error
            assert_answer(result, ranker.module, inputs)
    assert server.wait() == 0, "".join(server.log)
    assert "event=stopped" in server.log[-1]


def test_a_full_queue_refuses_and_serves_on(start_server: StartServer, ranker: Served) -> None:
    server = start_server("--max-queue", "1")
    inputs = make_inputs(1, MAX_CANDIDATES, seed=6)

    def ask(_: int) -> str:
        with triton.InferenceServerClient(server.grpc_address) as own:
            try:
                assert_answer(own.infer("ranker", infer_inputs(inputs)), ranker.module, inputs)
            except InferenceServerException as refused:
                assert "--max-queue 1" in refused.message()
                return refused.status()
        return "ok"

    with ThreadPoolExecutor(8) as pool:
        statuses = list(pool.map(ask, range(8)))
    assert set(statuses) == {"ok", "StatusCode.RESOURCE_EXHAUSTED"}
    assert ask(0) == "ok"


def test_deadlines(start_server: StartServer, ranker: Served) -> None:
    server = start_server()
    inputs = make_inputs(1, MAX_CANDIDATES, seed=6)
    with triton.InferenceServerClient(server.grpc_address) as own:
        with pytest.raises(InferenceServerException, match="us in the queue") as refused:
            own.infer("ranker", infer_inputs(inputs), timeout=1)
        assert refused.value.status() == "StatusCode.DEADLINE_EXCEEDED"
        # The call's own deadline: the client gives up, and what waits is not run.
        answers: queue.Queue = queue.Queue()
        for limit in [None, *([0.001] * 8)]:
            own.async_infer(
                "ranker",
                infer_inputs(inputs),
                lambda result, error: answers.put(error),
                client_timeout=limit,
            )
        errors = [answers.get(timeout=60) for _ in range(9)]
        late = [x for x in errors if x is not None]
        assert len(late) == 8
        assert {x.status() for x in late} == {"StatusCode.DEADLINE_EXCEEDED"}
        assert_answer(own.infer("ranker", infer_inputs(inputs)), ranker.module, inputs)


def own_connection(server: Server) -> grpc.Channel:
    return grpc.insecure_channel(
        server.grpc_address, options=[("grpc.use_local_subchannel_pool", 1)]
    )


def is_live(channel: grpc.Channel, seconds: float = 1.0) -> bool:
    stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
    try:
        return stub.ServerLive(service_pb2.ServerLiveRequest(), timeout=seconds).live
    except grpc.RpcError as refused:
        assert refused.code() in (
            grpc.StatusCode.UNAVAILABLE,
            grpc.StatusCode.DEADLINE_EXCEEDED,
        ), refused
        return False


def test_connection_limit(start_server: StartServer, ranker: Served) -> None:
    server = start_server("--max-connections", "2")
    first, second = own_connection(server), own_connection(server)
    assert is_live(first, 10) and is_live(second, 10)
    for _ in range(3):
        with own_connection(server) as third:
            assert not is_live(third)
    assert is_live(first, 10) and is_live(second, 10)
    page = urllib.request.urlopen(f"http://{server.address}/metrics").read().decode()
    refused = re.search(r'ikbo_errors_total{kind="connection_limit"} (\d+)', page)
    assert refused is not None and int(refused[1]) >= 3
    for closed in (first, second):
        closed.close()
        with own_connection(server) as another:
            grpc.channel_ready_future(another).result(timeout=20)
            assert is_live(another, 10)
    inputs = make_inputs(1, 3, seed=2)
    with triton.InferenceServerClient(server.grpc_address) as client:
        result = client.infer("ranker", infer_inputs(inputs))
        assert_answer(result, ranker.module, inputs)


def http2_frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def half_a_call() -> bytes:
    """What a client of HTTP/2 sends up to the middle of an infer request's message."""
    fields = {
        b":method": b"POST",
        b":scheme": b"http",
        b":path": b"/inference.GRPCInferenceService/ModelInfer",
        b":authority": b"x",
        b"content-type": b"application/grpc",
        b"te": b"trailers",
    }
    head = b"".join(
        b"\0" + bytes([len(name)]) + name + bytes([len(value)]) + value
        for name, value in fields.items()
    )
    preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + http2_frame(4, 0, 0, b"")
    return preface + http2_frame(1, 4, 1, head) + http2_frame(0, 0, 1, b"\0\0\0\1\0half")


def send_raw(server: Server, sent: bytes) -> socket.socket:
    host, port = server.grpc_address.split(":")
    client = socket.create_connection((host, int(port)), timeout=30)
    client.sendall(sent)
    return client


def test_a_client_that_vanishes_in_a_call_is_dropped(start_server: StartServer) -> None:
    """One without HTTP/2 of its own answers no ping. How many calls it may have is said at once."""
    server = start_server(
        "--idle-timeout-ms", "1000", "--read-timeout-ms", "1000", "--max-queue", "300"
    )
    received = b""
    with send_raw(server, half_a_call()) as client:
        while part := client.recv(4096):
            received += part
    size = int.from_bytes(received[:3], "big")
    settings = dict(struct.iter_unpack(">HI", received[9 : 9 + size]))
    max_concurrent_streams = 3
    assert settings[max_concurrent_streams] == 600


def test_a_message_that_never_ends_is_dropped_though_pings_are_answered(
    start_server: StartServer,
) -> None:
    server = start_server("--idle-timeout-ms", "200", "--drain-timeout-ms", "300")
    ping, acknowledged, goaway = 6, 1, 7
    kinds = []
    begin = time.monotonic()
    with send_raw(server, half_a_call()) as client, client.makefile("rb") as received:
        while head := received.read(9):
            payload = received.read(int.from_bytes(head[:3], "big"))
            kinds.append(head[3])
            if head[3] == ping and not head[4] & acknowledged:
                client.sendall(http2_frame(ping, acknowledged, 0, payload))
    assert 1.5 < time.monotonic() - begin < 20
    assert goaway in kinds


def test_a_call_that_is_cancelled_in_its_message_is_no_bad_request(
    start_server: StartServer,
) -> None:
    server = start_server()
    cancelled = http2_frame(3, 0, 1, (8).to_bytes(4, "big"))

    def errors(kind: str) -> int:
        page = urllib.request.urlopen(f"http://{server.address}/metrics").read().decode()
        found = re.search(rf'ikbo_errors_total{{kind="{kind}"}} (\d+)', page)
        assert found is not None
        return int(found[1])

    with send_raw(server, half_a_call() + cancelled):
        deadline = time.monotonic() + 30
        while errors("disconnected") == 0:
            assert errors("bad_request") == 0 and time.monotonic() < deadline
            time.sleep(0.02)


def test_no_grpc_and_a_taken_port(start_server: StartServer, ranker: Served) -> None:
    assert "grpc_port=none" in "".join(started_log(start_server("--no-grpc")))
    first = start_server()
    port = first.grpc_address.split(":")[1]
    second = start_server("--grpc-port", port)
    assert second.wait() == 1
    assert f"must be a free address of this machine; got 127.0.0.1:{port}" in second.log[-1]


def started_log(server: Server) -> list[str]:
    assert server.port
    return server.log


@pytest.mark.parametrize("held_open", ["watch", "half_a_call"])
def test_streams_that_stay_open_do_not_keep_a_server_from_stopping(
    start_server: StartServer, ranker: Served, held_open: str
) -> None:
    server = start_server()
    with contextlib.ExitStack() as open_streams:
        if held_open == "watch":
            channel = open_streams.enter_context(grpc.insecure_channel(server.grpc_address))
            watch = channel.unary_stream(
                "/grpc.health.v1.Health/Watch",
                request_serializer=lambda x: x,
                response_deserializer=lambda x: x,
            )(b"")
            next(watch)
        else:
            open_streams.enter_context(send_raw(server, half_a_call()))
        begin = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        assert server.wait() == 0
    assert time.monotonic() - begin < 15
