"""The page `/docs`: the OpenAPI document as HTML, without scripts and without anything from another server."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

from fastapi import FastAPI
from fastapi.responses import HTMLResponse

from polar_proxy.types import Json

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60em; margin: 2em auto; padding: 0 1em }
table { border-collapse: collapse; width: 100% }
td { border-top: 1px solid #8884; padding: .3em .6em; vertical-align: top }
code { font-size: 13px }
summary { cursor: pointer }
h2 { margin-top: 2em }
p { white-space: pre-line }
"""


def serve_docs(app: FastAPI) -> None:
    """Add the route `/docs`."""

    @app.get("/docs", include_in_schema=False)
    async def docs() -> HTMLResponse:
        return HTMLResponse(docs_page(app.openapi()), headers={"content-security-policy": _POLICY})


def docs_page(openapi: Json) -> str:
    """Return the page of an OpenAPI document: its routes by tag, then the models that they take and return."""
    by_tag: dict[str, list[str]] = {}
    for path, methods in openapi.get("paths", {}).items():
        for method, operation in methods.items():
            tag = (operation.get("tags") or ["gateway"])[0]
            by_tag.setdefault(tag, []).append(_operation(method.upper(), path, operation))
    models = openapi.get("components", {}).get("schemas", {})
    title = escape(f"{openapi['info']['title']} {openapi['info']['version']}")
    body = [f"<h1>{title}</h1><p>The same as a document for programs: <a href='openapi.json'>openapi.json</a></p>"]
    for tag, operations in by_tag.items():
        body += [f"<h2>{escape(tag)}</h2>", *operations]
    body.append("<h2>Models</h2>")
    body += [_model(name, model) for name, model in sorted(models.items())]
    head = f"<meta charset=utf-8><meta name=viewport content='width=device-width'><title>{title}</title>"
    return f"<!doctype html><html lang=en><head>{head}<style>{_STYLE}</style></head><body>{''.join(body)}</body></html>"


def _operation(method: str, path: str, operation: Json) -> str:
    rows = [
        (f"{parameter['name']} ({parameter['in']})", parameter.get("schema", {}), parameter.get("description", ""))
        for parameter in operation.get("parameters", ())
    ]
    for content in operation.get("requestBody", {}).get("content", {}).values():
        rows.append(("body", content.get("schema", {}), ""))
    for status, response in operation.get("responses", {}).items():
        schemas = [content.get("schema", {}) for content in response.get("content", {}).values()]
        rows.append((f"→ {status}", schemas[0] if schemas else {}, response.get("description", "")))
    about = operation.get("description") or operation.get("summary", "")
    head = f"<summary><code><b>{escape(method)}</b> {escape(path)}</code></summary>"
    return f"<details>{head}<p>{escape(about)}</p>{_table(rows)}</details>"


def _model(name: str, model: Json) -> str:
    required = set(model.get("required", ()))
    rows = [
        (f"{field}{' *' if field in required else ''}", schema, schema.get("description", ""))
        for field, schema in model.get("properties", {}).items()
    ]
    about = escape(model.get("description", ""))
    return f"<h3 id='{escape(name, quote=True)}'>{escape(name)}</h3><p>{about}</p>{_table(rows)}"


def _table(rows: Iterable[tuple[str, Json, str]]) -> str:
    lines = (
        f"<tr><td><code>{escape(name)}</code></td><td>{_type(schema)}</td><td>{escape(text)}</td></tr>"
        for name, schema, text in rows
    )
    return f"<table>{''.join(lines)}</table>"


def _type(schema: Json) -> str:
    """Return the type of a value in words, with links to models."""
    if "$ref" in schema:
        name = escape(schema["$ref"].rpartition("/")[2], quote=True)
        return f"<a href='#{name}'>{name}</a>"
    if choices := schema.get("anyOf") or schema.get("allOf") or schema.get("oneOf"):
        return " or ".join(map(_type, choices))
    if "enum" in schema or "const" in schema:
        return ", ".join(escape(str(value)) for value in schema.get("enum", [schema.get("const")]))
    if schema.get("type") == "array":
        return f"list of {_type(schema.get('items', {}))}"
    return escape(str(schema.get("type", "any")))
