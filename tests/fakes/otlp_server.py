"""An OTLP/HTTP receiver in memory: it decodes the spans that it gets, as a collector does."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from tests.fakes.http_server import serve_http


class OtlpServer:
    """Spans by name, with their resource's service name in `services`."""

    def __init__(self) -> None:
        self.spans: list[Any] = []
        self.services: set[str] = set()
        self.headers: list[dict[str, str]] = []
        self.gate = threading.Event()
        """Requests wait until it is set."""
        self.gate.set()
        self.url = ""

    def named(self, start: str) -> list[Any]:
        return [span for span in self.spans if span.name.startswith(start)]

    def take(self, body: bytes, headers: dict[str, str]) -> None:
        request = ExportTraceServiceRequest()
        request.ParseFromString(gzip.decompress(body) if headers.get("content-encoding") == "gzip" else body)
        self.headers.append(headers)
        for resource in request.resource_spans:
            self.services |= {
                one.value.string_value for one in resource.resource.attributes if one.key == "service.name"
            }
            for scope in resource.scope_spans:
                self.spans += scope.spans


def attributes_of(span: Any) -> dict[str, Any]:
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in span.attributes}


@contextmanager
def otlp_server() -> Iterator[OtlpServer]:
    server = OtlpServer()

    def answer(headers: dict[str, str], body: bytes) -> tuple[int, bytes]:
        server.gate.wait(30)
        server.take(body, headers)
        return 200, b""

    with serve_http(answer) as url:
        server.url = f"{url}/v1/traces"
        try:
            yield server
        finally:
            server.gate.set()
