"""Removes secrets from values before they are stored.

Headers are never recorded, but bodies, addresses and error texts can contain keys as well. This module removes

* the string values of JSON fields with the name of a secret (`FIELDS`) and of all fields in `headers`;
* in every other string that is a parameter or a name (`model`, `user`, metadata, labels, consumers, sources), anything
  that looks like a provider's key, a bearer token, a private key, a password in a URL or a key among its query
  parameters (`PATTERNS`), and Polar's own session keys.

A secret without such a form, such as a password of plain words, is not recognised.

Promises: a value without secrets is returned unchanged (JSON bytes: byte for byte), and removing twice has the effect
of removing once. Messages and answers are not changed by this module: they are what the model read and wrote, token by
token.
"""

from __future__ import annotations

import re
from collections.abc import Callable
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
"""Field names in lower case, without `-` and `_`."""
_MAPS = frozenset({"headers", "extraheaders", "httpheaders"})


def _if_it_has_a_digit(found: re.Match[str]) -> str:
    """Remove a key only if it contains a digit. Otherwise many hyphenated words would be removed."""
    return REMOVED if _DIGIT.search(found[0]) else found[0]


_DIGIT = re.compile(r"\d")
PATTERNS: tuple[tuple[str, re.Pattern[str], str | Callable[[re.Match[str]], str]], ...] = (
    ("provider key (OpenAI, Anthropic, Stripe, Polar)", re.compile(r"\b[spr]k-[\w-]{16,}"), _if_it_has_a_digit),
    ("key of Polar's API", re.compile(r"\b(?:polar-(?:admin|trainer)-|whsec_)[\w+/=-]{16,}"), REMOVED),
    ("Google API key", re.compile(r"\bAIza[\w-]{30,}"), REMOVED),
    ("GitHub token", re.compile(r"\b(?:gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{20,})"), REMOVED),
    ("GitLab token", re.compile(r"\bglpat-[\w-]{16,}"), REMOVED),
    ("Hugging Face token", re.compile(r"\bhf_[A-Za-z0-9]{20,}"), REMOVED),
    ("Slack token", re.compile(r"\bxox[abeoprs]-[\w-]{10,}"), REMOVED),
    ("AWS access key", re.compile(r"\b(?:AKIA|ASIA)[0-9A-Z]{16}\b"), REMOVED),
    (
        "JSON web token",
        re.compile(r"\beyJ[\w-]{8,}+(?P<rest>\.[\w-]{8,}+\.[\w-]{8,})?"),
        lambda found: REMOVED if found["rest"] else found[0],
    ),
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
"""(name, pattern, replacement). A pattern takes time linear in the text, whatever the text is: a text that it scans in
vain is consumed by a match that replaces nothing."""
_QUICK_CHECK = re.compile(
    r"[spr]k-|polar-(?:adm|tra)|whsec_|AIza|gh[pousr]_|github_pat_|glpat-|hf_|xox|A[KS]IA|eyJ|earer|asic|BEGIN|://|[?&;]|^/s/",
    re.I,
)
"""Matches every text that any of the patterns matches."""


def without_secrets(text: str) -> str:
    """Return the text without secrets; the same object if it has none."""
    if not _QUICK_CHECK.search(text):
        return text
    clean = text
    for _, pattern, replacement in PATTERNS:
        clean = pattern.sub(replacement, clean)
    return text if clean == text else clean


def clean_label(text: str | None) -> str | None:
    """Return a label or name given by a user, without secrets and without characters that databases refuse."""
    return None if text is None else json_codec.clean_text(without_secrets(text))


def json_without_secrets(value: Any) -> Any:
    """Return the value without secrets; the same object if it has none."""
    if isinstance(value, str):
        return without_secrets(value)
    if isinstance(value, list):
        items = [json_without_secrets(item) for item in value]
        return items if any(new is not old for new, old in zip(items, value, strict=True)) else value
    if isinstance(value, dict):
        fields = {key: _clean_field(key, item) for key, item in value.items()}
        return fields if any(fields[key] is not item for key, item in value.items()) else value
    return value


def bytes_without_secrets(content: bytes) -> bytes:
    """Return JSON bytes without secrets, unchanged if there are none. Other content is treated as text."""
    try:
        value = json_codec.loads(content)
    except ValueError:
        return log_without_secrets(content)
    clean = json_without_secrets(value)
    return content if clean is value else json_codec.dumps(clean)


def log_without_secrets(content: bytes) -> bytes:
    """Return the bytes of a text without secrets, in the same encoding, which may be any that extends ASCII."""
    text = content.decode("utf-8", "surrogateescape")
    clean = without_secrets(text)
    return content if clean == text else clean.encode("utf-8", "surrogateescape")


def _clean_field(name: Any, value: Any) -> Any:
    if not isinstance(value, str | list | dict):
        return value
    known = name.lower().replace("-", "").replace("_", "") if isinstance(name, str) else ""
    if known in FIELDS:
        if isinstance(value, str) and value:
            return value if value == REMOVED else REMOVED
        if isinstance(value, list) and value and all(isinstance(item, str) for item in value):
            return value if set(value) == {REMOVED} else [REMOVED] * len(value)
    if known in _MAPS and isinstance(value, dict):
        if all(item == REMOVED for item in value.values() if isinstance(item, str)):
            return json_without_secrets(value)
        return {key: REMOVED if isinstance(item, str) else _clean_field(key, item) for key, item in value.items()}
    return json_without_secrets(value)
