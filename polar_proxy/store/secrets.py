"""Secrets out of what is about to be written. Pure: values in, values out.

Headers are never recorded, but bodies, addresses and error texts can carry keys as well. Removed are

* the string values of JSON fields whose name says that they are secret (`FIELDS`, and all that stands in `headers`),
* in every other string, what looks like a key of a known provider, a bearer token, a private key, a password within a
  URL or a key among its query parameters (`PATTERNS`), and Polar's own session keys.

Promises: what holds no secret comes back equal (JSON bytes: byte for byte); removing twice is removing once. Messages
and answers are not for this module: they are what the model read and said, token by token.
"""

from __future__ import annotations

import re
from typing import Any

from polar_proxy.store import json_codec

REMOVED = "[secret removed]"

FIELDS = frozenset(
    {
        *("authorization", "proxyauthorization", "authorizationtoken", "authtoken", "bearertoken", "xauthtoken"),
        *("apikey", "xapikey", "xgoogapikey", "accesskey", "secretkey", "secretaccesskey", "privatekey"),
        *("accesstoken", "refreshtoken", "idtoken", "sessiontoken", "apitoken", "token", "sessionkey"),
        *("clientsecret", "secret", "password", "passwd", "passphrase", "cookie", "setcookie", "credentials"),
    }
)
"""Names in lower case, without `-` and `_`."""
_MAPS = frozenset({"headers", "extraheaders", "httpheaders"})

_KEY = r"(?=[\w-]*\d)[\w-]"
"""A character of a key, where it begins; with a digit somewhere, or half of the hyphenated words would be keys."""
PATTERNS: tuple[tuple[str, re.Pattern[str], str], ...] = (
    ("provider key (OpenAI, Anthropic, Stripe, Polar)", re.compile(rf"\b[spr]k-{_KEY}[\w-]{{15,}}"), REMOVED),
    ("key of Polar's API", re.compile(r"\b(?:polar-(?:admin|trainer)-|whsec_)[\w+/=-]{16,}"), REMOVED),
    ("Google API key", re.compile(r"\bAIza[\w-]{30,}"), REMOVED),
    ("GitHub token", re.compile(r"\b(?:gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{20,})"), REMOVED),
    ("GitLab token", re.compile(r"\bglpat-[\w-]{16,}"), REMOVED),
    ("Hugging Face token", re.compile(r"\bhf_[A-Za-z0-9]{20,}"), REMOVED),
    ("Slack token", re.compile(r"\bxox[abeoprs]-[\w-]{10,}"), REMOVED),
    ("AWS access key", re.compile(r"\b(?:AKIA|ASIA)[0-9A-Z]{16}\b"), REMOVED),
    ("JSON web token", re.compile(r"\beyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]{8,}"), REMOVED),
    (
        "Authorization value",
        re.compile(r"\b(Bearer|Basic)\s+(?=[\w.~+/=-]*\d)[\w.~+/=-]{12,}", re.IGNORECASE),
        rf"\1 {REMOVED}",
    ),
    (
        "private key",
        re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.DOTALL),
        REMOVED,
    ),
    ("password in a URL", re.compile(r"(?<=://)[^/\s:@\"']*:[^/\s@\"']+(?=@)"), REMOVED),
    (
        "key in a query",
        re.compile(
            r"(?i)([?&;](?:x-)?(?:goog-)?(?:api[-_]?key|key|access[-_]?token|auth|token|sig|signature|secret|password)=)"
            r"(?!\[secret removed\])[^&\s\"'#;]+"
        ),
        rf"\1{REMOVED}",
    ),
    ("session key in a path", re.compile(r"^(/s/)(?!\[secret removed\])[^/?]+"), rf"\1{REMOVED}"),
)
"""(what it is, how it looks, what is put in its place)."""
_SIGNS = re.compile(
    r"[spr]k-|polar-(?:adm|tra)|whsec_|AIza|gh[pousr]_|github_pat_|glpat-|hf_|xox|A[KS]IA|eyJ|earer|asic|BEGIN|://|[?&;]|^/s/",
    re.I,
)
"""Where none of these is, none of the patterns is."""


def without_secrets(text: str) -> str:
    if _SIGNS.search(text):
        for _, pattern, instead in PATTERNS:
            text = pattern.sub(instead, text)
    return text


def json_without_secrets(value: Any) -> Any:
    """The same object where nothing is removed."""
    if isinstance(value, str):
        return without_secrets(value)
    if isinstance(value, list):
        found = [json_without_secrets(item) for item in value]
        return found if any(new is not old for new, old in zip(found, value, strict=True)) else value
    if isinstance(value, dict):
        made = {key: _field(key, item) for key, item in value.items()}
        return made if any(made[key] is not item for key, item in value.items()) else value
    return value


def bytes_without_secrets(content: bytes) -> bytes:
    """JSON bytes as they came, or written anew where something was removed; what is no JSON is taken as text."""
    try:
        value = json_codec.loads(content)
    except ValueError:
        return log_without_secrets(content)
    clean = json_without_secrets(value)
    return content if clean is value else json_codec.dumps(clean)


def log_without_secrets(content: bytes) -> bytes:
    """Of text in any encoding that has ASCII in it."""
    text = content.decode("utf-8", "surrogateescape")
    clean = without_secrets(text)
    return content if clean == text else clean.encode("utf-8", "surrogateescape")


def _field(name: Any, value: Any) -> Any:
    known = name.lower().replace("-", "").replace("_", "") if isinstance(name, str) else ""
    if known in FIELDS:
        if isinstance(value, str) and value:
            return value if value == REMOVED else REMOVED
        if isinstance(value, list) and value and all(isinstance(item, str) for item in value):
            return value if set(value) == {REMOVED} else [REMOVED] * len(value)
    if known in _MAPS and isinstance(value, dict):
        if all(item == REMOVED for item in value.values() if isinstance(item, str)):
            return json_without_secrets(value)
        return {key: REMOVED if isinstance(item, str) else json_without_secrets(item) for key, item in value.items()}
    return json_without_secrets(value)
