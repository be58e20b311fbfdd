"""Random requests for `fuzz.py`: model routes by the grammar of each dialect, routes of stored responses and of
conversations, API routes by the OpenAPI document, WebSockets, and damaged HTTP. A case follows from the seed and its
number alone."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from benchmarks._stacks.fuzz_websockets import UNKNOWN_STEM, WebSocketCase, make_websocket_case
from tests.gateway.random_bodies import (
    CONVERSATION_ROUTES,
    DELETED,
    ROUTES,
    STORED_QUERIES,
    STORED_ROUTES,
    STRANGE_RESPONSES,
    BodyGenerator,
    Route,
    referring,
)

_METHODS = ("GET", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "HEAD")
_SECONDS = ("timeout", "wait", "seconds", "timeout_seconds", "wait_seconds")
"""Fields in which a client sends a number of seconds that the server shall wait."""
_TEXTS = (
    *("", "0", "-1", "x", "é", "\0", "%", "../..", "null", "true", "1e400", "' OR 1=1 --"),
    *("9" * 40, "a" * 3000, "[" * 200),
)
_PATHS = (
    *("/healthz", "/readyz", "/metrics", "/v1/models", "/v1/models/x", "/openapi.json", "/api/hello"),
    *("/", "/nothing", "/s/", "/s//v1/models", "/s/%2F/healthz", "/s/a/s/b/v1/models", "/s/a%FF/v1/messages", "/s/x"),
    *("/v1/responses/", "/v1/responses/x/y", "/v1/responses//input_items", "/v1/responses/x/cancel/"),
)
_JUNK = (b"\r\n", b"\0", b"\r", b"\n", b" ", b":", b"%00", b"\xff", b"x" * 300)
_HEADERS = ("x-stainless-retry-count", "accept", "content-type", "user-agent")


@dataclass(frozen=True)
class FuzzCase:
    number: int
    name: str
    request: bytes
    route: Route | None = None
    """The model route, in whose format the answer must be; None for other routes."""
    endless: bool = False
    """True if the answer is an endless stream, of which only the status is read."""
    before: tuple[bytes, ...] = ()
    """Requests that are sent first, on the same connection. The first one creates a response or conversation. Its id
    replaces `UNKNOWN_STEM` in the other requests and in `request`."""


class CaseGenerator:
    def __init__(self, seed: int, keys: list[str], admin_key: str, openapi: dict[str, Any]) -> None:
        self._seed = seed
        self._keys = keys
        self._admin_key = admin_key
        schemas = openapi.get("components", {}).get("schemas", {})
        self._operations = [
            (method.upper(), path, operation)
            for path, operations in sorted(openapi["paths"].items())
            for method, operation in sorted(operations.items())
            if path.startswith("/api/")
        ]
        self._fields = sorted({name for schema in schemas.values() for name in schema.get("properties", {})})
        self._schemas = schemas

    def make(self, number: int) -> FuzzCase | WebSocketCase:
        rng = random.Random(f"{self._seed}:{number}")
        kind = rng.random()
        if kind < 0.56:
            return self._model_case(number, rng)
        if kind < 0.64:
            return self._stored_case(number, rng)
        if kind < 0.66:
            return self._conversation_case(number, rng)
        if kind < 0.70:
            path = rng.choice(_PATHS) if rng.random() < 0.1 else "/v1/responses"
            path, key = _with_key(rng, path, rng.choice((*self._keys, "unknown")))
            return make_websocket_case(number, rng, path, key)
        if kind < 0.88:
            return self._api_case(number, rng)
        if kind < 0.91:
            path = rng.choice(_PATHS)
            url = path + rng.choice(("", "", "?x=" + quote(rng.choice(_TEXTS))))
            url, key = _with_key(rng, url, self._key(rng))
            return FuzzCase(number, path, self._http(rng, rng.choice(_METHODS), url, b"", key))
        return self._damaged(number, rng)

    def _model_case(self, number: int, rng: random.Random) -> FuzzCase:
        name = rng.choice(list(ROUTES))
        route = ROUTES[name]
        path, key = _with_key(rng, route.path, rng.choice(self._keys))
        request = self._http(rng, "POST", path, BodyGenerator(route, rng).make(), key)
        return FuzzCase(number, _named(name, path), request, route)

    def _stored_case(self, number: int, rng: random.Random) -> FuzzCase:
        """Return a case that creates a stored response, perhaps changes it, and then sends a request that uses it."""
        key = rng.choice(self._keys)
        body = {"model": "m", "input": f"hi {number}", "background": rng.random() < 0.3}
        create = self._http(rng, "POST", "/v1/responses", json.dumps(body).encode(), key)
        changes = rng.choice(([], [], [("DELETE", "")], [("POST", "/cancel")], [("GET", ""), ("DELETE", "")]))
        url = f"/v1/responses/resp_{UNKNOWN_STEM}"
        before = (create, *(self._http(rng, method, url + end, b"", key) for method, end in changes))
        if rng.random() < 0.15:
            key = self._key(rng)
        if rng.random() < 0.35:
            name = rng.choice(("responses", "responses/compact", "responses/input_tokens"))
            path, key = _with_key(rng, ROUTES[name].path, key)
            body = referring(rng, f"resp_{UNKNOWN_STEM}")
            request = self._http(rng, "POST", path, json.dumps(body).encode(), key)
            return FuzzCase(number, f"{name} of a stored response", request, ROUTES[name], before=before)
        end = rng.choice(list(STORED_ROUTES))
        method = rng.choice(("POST" if end == "/cancel" else "GET", rng.choice(_METHODS)))
        if rng.random() < 0.1:
            url = f"/v1/responses/{rng.choice(STRANGE_RESPONSES)}"
        path, key = _with_key(rng, url + end, key)
        request = self._http(rng, method, path + rng.choice(STORED_QUERIES), b"", key)
        route = None if method == "HEAD" else DELETED if method == "DELETE" else STORED_ROUTES[end]
        return FuzzCase(number, _named(f"{method} /v1/responses/{{id}}{end}", path), request, route, before=before)

    def _conversation_case(self, number: int, rng: random.Random) -> FuzzCase:
        """Return a case that creates a conversation, and then sends a request that uses it."""
        key = rng.choice(self._keys)
        body = json.dumps({"items": [{"role": "user", "content": f"hi {number}"}]}).encode()
        if rng.random() < 0.3:
            body = BodyGenerator(CONVERSATION_ROUTES[""], rng).make()
        create = self._http(rng, "POST", "/v1/conversations", body, key)
        conversation = rng.choice((f"conv_{UNKNOWN_STEM}", f"conv_{UNKNOWN_STEM}", *STRANGE_RESPONSES))
        if rng.random() < 0.15:
            key = self._key(rng)
        if rng.random() < 0.4:
            route = ROUTES["responses"]
            path, key = _with_key(rng, route.path, key)
            continued = {"model": "m", "input": "x", "conversation": rng.choice((conversation, {"id": conversation}))}
            request = self._http(rng, "POST", path, json.dumps(continued).encode(), key)
            return FuzzCase(number, "responses of a conversation", request, route, before=(create,))
        end = rng.choice(list(CONVERSATION_ROUTES))
        method = rng.choice(("GET", "POST", "DELETE", rng.choice(_METHODS)))
        route = CONVERSATION_ROUTES[end]
        body = BodyGenerator(route, rng).make() if method == "POST" and route.right else b""
        path, key = _with_key(rng, f"/v1/conversations/{conversation}{end}", key)
        request = self._http(rng, method, path + rng.choice(STORED_QUERIES), body, key)
        name = _named(f"{method} /v1/conversations/{{id}}{end}", path)
        return FuzzCase(number, name, request, None if method == "HEAD" else route, before=(create,))

    def _api_case(self, number: int, rng: random.Random) -> FuzzCase:
        method, template, operation = rng.choice(self._operations)
        path, query = template, []
        for parameter in operation.get("parameters", ()):
            text = quote(rng.choice((*_TEXTS, "job_01", "roll_01", "run")), safe="")
            if parameter["in"] == "path":
                path = path.replace("{" + parameter["name"] + "}", text or "x")
            elif parameter["in"] == "query" and rng.random() < 0.6:
                query.append(f"{parameter['name']}={text}")
        body = b""
        if "requestBody" in operation:
            body = json.dumps(self._api_body(operation, rng)).encode()
            if rng.random() < 0.1:
                body = body[: rng.randrange(len(body))]
        path += "?" + "&".join(query) if query else ""
        key = self._admin_key if rng.random() < 0.8 else self._key(rng)
        request = self._http(rng, method, path, body, key)
        return FuzzCase(number, f"{method} {template}", request, endless=template.endswith("/events"))

    def _api_body(self, operation: dict[str, Any], rng: random.Random) -> Any:
        schema = operation["requestBody"]["content"]["application/json"]["schema"]
        value = self._value(schema, rng)
        if isinstance(value, dict):
            if rng.random() < 0.2:
                value[rng.choice(self._fields)] = rng.choice(_TEXTS)
            for name in _SECONDS:
                if name in value:
                    value[name] = rng.choice((0, 0.1, -1, "x"))
        return value

    def _value(self, schema: dict[str, Any], rng: random.Random, depth: int = 0) -> Any:
        """Return a random value that fits a JSON schema, or sometimes one that does not."""
        if rng.random() < 0.08 or depth > 6:
            return rng.choice((None, True, 0, -1, 1.5, 2**63, 10**30, [], {}, *_TEXTS))
        if "$ref" in schema:
            return self._value(self._schemas[schema["$ref"].rsplit("/", 1)[-1]], rng, depth + 1)
        for several in ("anyOf", "oneOf", "allOf"):
            if several in schema:
                return self._value(rng.choice(schema[several]), rng, depth + 1)
        if "enum" in schema or "const" in schema:
            return rng.choice(schema.get("enum") or [schema["const"]])
        match schema.get("type"):
            case "object":
                required = schema.get("required", ())
                properties = schema.get("properties", {})
                chosen = [name for name in properties if name in required or rng.random() < 0.3]
                return {name: self._value(properties[name], rng, depth + 1) for name in chosen}
            case "array":
                return [self._value(schema.get("items", {}), rng, depth + 1) for _ in range(rng.randrange(3))]
            case "integer":
                return rng.choice((0, 1, 2, 100, -1, 2**31))
            case "number":
                return rng.choice((0, 0.5, 1, -1, 1e300))
            case "boolean":
                return rng.random() < 0.5
        return rng.choice(_TEXTS)

    def _damaged(self, number: int, rng: random.Random) -> FuzzCase:
        """Return a request with random damage in its HTTP head."""
        route = ROUTES[rng.choice(list(ROUTES))]
        raw = bytearray(self._http(rng, "POST", route.path, BodyGenerator(route, rng).make(), rng.choice(self._keys)))
        head = raw.index(b"\r\n\r\n")
        for _ in range(rng.choice((1, 1, 2, 5))):
            place = rng.randrange(head)
            match rng.randrange(4):
                case 0:
                    raw[place : place + 1] = rng.randbytes(1)
                case 1:
                    del raw[place : place + rng.randrange(20)]
                case 2:
                    raw[place:place] = rng.choice(_JUNK)
                case 3:
                    line = rng.choice((b"transfer-encoding: chunked", b"content-length: 3", b"expect: 100-continue"))
                    raw[raw.find(b"\r\n") + 2 : raw.find(b"\r\n") + 2] = line + b"\r\n"
        return FuzzCase(number, "damaged HTTP", bytes(raw))

    def _key(self, rng: random.Random) -> str:
        return rng.choice((*self._keys, "", "unknown", "\x7f", "a" * 500))

    def _http(self, rng: random.Random, method: str, path: str, body: bytes, key: str) -> bytes:
        lines = [f"{method} {path} HTTP/1.1", "host: localhost", f"authorization: Bearer {key}"]
        if rng.random() < 0.05:
            lines.append(f"{rng.choice(_HEADERS)}: {rng.randrange(9)}")
        if body and rng.random() < 0.1:
            half = len(body) // 2
            chunks = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in (body[:half], body[half:]) if part)
            return "\r\n".join([*lines, "transfer-encoding: chunked", "", ""]).encode("latin-1") + chunks + b"0\r\n\r\n"
        lines += ["content-type: application/json", f"content-length: {len(body)}", "", ""]
        return "\r\n".join(lines).encode("latin-1") + body


def _with_key(rng: random.Random, path: str, key: str) -> tuple[str, str]:
    """Return a path, and the key for the headers: in some requests the key is in the path."""
    if rng.random() < 0.85:
        return path, key
    return f"/s/{quote(key, safe='')}{path}", rng.choice((key, "", "other"))


def _named(name: str, path: str) -> str:
    return f"/s/{{key}} {name}" if path.startswith("/s/") else name
