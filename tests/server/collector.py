# SPDX-License-Identifier: Apache-2.0
"""A collector that takes spans over OTLP with JSON, and checks them against OTLP's own messages."""

from __future__ import annotations

import base64
import json
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any

from google.protobuf import json_format
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

WAIT_SECONDS = 20


def parse_export(text: bytes) -> ExportTraceServiceRequest:
    """The message of a body. OTLP has ids in hex where protobuf's JSON has base64."""

    def with_base64(value: Any) -> Any:
        if isinstance(value, list):
            return [with_base64(item) for item in value]
        if not isinstance(value, dict):
            return value
        sizes = {"traceId": 16, "spanId": 8, "parentSpanId": 8}
        fields = {}
        for key, item in value.items():
            if key in sizes:
                raw = bytes.fromhex(item)
                assert len(raw) == sizes[key] and item == item.lower(), f"{key}: {item}"
                fields[key] = base64.b64encode(raw).decode()
            else:
                fields[key] = with_base64(item)
        return fields

    message = ExportTraceServiceRequest()
    json_format.ParseDict(with_base64(json.loads(text)), message)  # refuses unknown fields
    return message


def attributes(span: Span) -> dict[str, Any]:
    return {x.key: getattr(x.value, x.value.WhichOneof("value")) for x in span.attributes}


class Collector:
    """Listens on a free port; `statuses` are the answers to come, 200 after the last."""

    def __init__(self, statuses: list[int] | None = None, reply: bytes = b"{}") -> None:
        self.exports: list[ExportTraceServiceRequest] = []
        self.errors: list[str] = []
        self.paths: list[str] = []
        self.num_posts = 0
        statuses = list(statuses or [])
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                collector.num_posts += 1
                status = statuses.pop(0) if statuses else 200
                if status == 200:
                    collector.take(self.path, self.headers["Content-Type"], body)
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(reply)))
                self.end_headers()
                self.wfile.write(reply)

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def take(self, path: str, content_type: str, body: bytes) -> None:
        self.paths.append(path)
        try:
            assert content_type == "application/json"
            self.exports.append(parse_export(body))
        except Exception as error:  # told by `spans`, in the test's thread
            self.errors.append(f"{error}: {body[:2000]!r}")

    def spans(self) -> list[Span]:
        assert not self.errors, self.errors
        return [
            span
            for export in self.exports
            for resource in export.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]

    def wait_for(self, is_enough: Callable[[list[Span]], bool]) -> list[Span]:
        """The spans, once they are enough."""
        end = time.monotonic() + WAIT_SECONDS
        while not is_enough(self.spans()):
            assert time.monotonic() < end, f"got {self.spans()}"
            time.sleep(0.05)
        return self.spans()

    def __enter__(self) -> Collector:
        self._thread.start()
        return self

    def __exit__(
        self,
        _type: type[BaseException] | None,
        _error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
