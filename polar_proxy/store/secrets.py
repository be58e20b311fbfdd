"""Removes secrets from values before they are stored.

HTTP headers are never recorded, but other values can contain secrets, too. The store cleans the following values before
it writes them: request parameters, tool definitions, paths, model names, labels, names of consumers and reward sources,
reward details, error texts, log files and the texts of dialogues. It does not clean messages and answers, because they
must match the recorded tokens. It does not clean patches either, because a changed patch might not apply.

In a value that is cleaned, this module replaces

* in JSON, every string in a field with the name of a secret (`FIELDS`), and every string in `headers`;
* in every other text, the parts that look like a provider's key, one of Polar's keys, a bearer token, a private key, a
  password in a URL or a key among its query parameters (`FORMS`).

A secret without such a form, such as a password of plain words, is not recognised.

Promises: a value without secrets is returned unchanged (JSON bytes: byte for byte). If secrets are removed from a value
twice, the second removal changes nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

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
"""Names of JSON fields that hold secrets, in lower case, without `-` and `_`. Strings in such fields are replaced."""
_MAPS = frozenset({"headers", "extraheaders", "httpheaders"})


def _if_it_has_a_digit(found: re.Match[str]) -> str:
    """Remove a key only if it contains a digit. Without this condition, many hyphenated words would be removed."""
    return REMOVED if _DIGIT.search(found[0]) else found[0]


_DIGIT = re.compile(r"\d")


class SecretForm(NamedTuple):
    """A form of secrets that is recognised in text.

    The time of a search grows only linearly with the length of the text. For this, no text may be scanned twice.
    Matched text is not scanned again, so some patterns also match text that only begins like a secret. `replacement`
    leaves such a match unchanged.
    """

    name: str
    signs: tuple[str, ...]
    """Texts in lower case. Every match of `pattern` contains at least one of them, in upper or lower case. So a text
    that contains none of them is not scanned."""
    pattern: re.Pattern[str]
    replacement: str | Callable[[re.Match[str]], str] = REMOVED


_PRIVATE_KEY = SecretForm(
    "private key",
    ("-----begin ",),
    re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.DOTALL),
)
FORMS = (
    SecretForm(
        "provider key (OpenAI, Anthropic, Stripe, Polar)",
        ("sk-", "pk-", "rk-"),
        re.compile(r"\b[spr]k-[\w-]{16,}"),
        _if_it_has_a_digit,
    ),
    SecretForm(
        "key of Polar's API",
        ("polar-admin-", "polar-trainer-", "whsec_"),
        re.compile(r"\b(?:polar-(?:admin|trainer)-|whsec_)[\w+/=-]{16,}"),
    ),
    SecretForm("Google API key", ("aiza",), re.compile(r"\bAIza[\w-]{30,}")),
    SecretForm(
        "GitHub token",
        ("ghp_", "gho_", "ghu_", "ghs_", "ghr_", "github_pat_"),
        re.compile(r"\b(?:gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{20,})"),
    ),
    SecretForm("GitLab token", ("glpat-",), re.compile(r"\bglpat-[\w-]{16,}")),
    SecretForm("Hugging Face token", ("hf_",), re.compile(r"\bhf_[A-Za-z0-9]{20,}")),
    SecretForm("Slack token", ("xox",), re.compile(r"\bxox[abeoprs]-[\w-]{10,}")),
    SecretForm("AWS access key", ("akia", "asia"), re.compile(r"\b(?:AKIA|ASIA)[0-9A-Z]{16}\b")),
    SecretForm(
        "JSON web token",
        ("eyj",),
        re.compile(r"\beyJ[\w-]{8,}+(?P<rest>\.[\w-]{8,}+\.[\w-]{8,})?"),
        lambda found: REMOVED if found["rest"] else found[0],
    ),
    SecretForm(
        "Authorization value",
        ("bearer", "basic"),
        re.compile(r"\b(Bearer|Basic)\s+(?=[\w.~+/=-]*\d)[\w.~+/=-]{12,}", re.IGNORECASE),
        rf"\1 {REMOVED}",
    ),
    SecretForm("password in a URL", ("://",), re.compile(r"(?<=://)[^/\s:@\"']*:[^/\s@\"']+(?=@)")),
    SecretForm(
        "key in a query",
        ("key=", "token=", "auth=", "sig=", "signature=", "secret=", "password="),
        re.compile(
            r"(?i)([?&;](?:x-)?(?:goog-)?(?:api[-_]?key|key|access[-_]?token|auth|token|sig|signature|secret|password)=)"
            r"(?!\[secret removed\])[^&\s\"'#;]+"
        ),
        rf"\1{REMOVED}",
    ),
    SecretForm("session key in a path", ("/s/",), re.compile(r"^(/s/)(?!\[secret removed\])[^/?]+"), rf"\1{REMOVED}"),
)
"""The forms of all secrets except private keys, which have several lines."""
_SIGNS = tuple(sign for form in (*FORMS, _PRIVATE_KEY) for sign in form.signs)
_PIECE = 1 << 16
_CUT = re.compile(r"(?<!earer)(?<!asic)(?<!\s)\s", re.IGNORECASE)
"""White space that no secret of `FORMS` can contain. Cutting a long text before such white space splits no secret."""


def without_secrets(text: str) -> str:
    """Return the text without secrets; the same object if it has none."""
    folded = text.lower()
    if not any(map(folded.__contains__, _SIGNS)):
        return text
    forms = [form for form in FORMS if any(sign in folded for sign in form.signs)]
    clean = text
    if _PRIVATE_KEY.signs[0] in folded:
        clean = _PRIVATE_KEY.pattern.sub(_PRIVATE_KEY.replacement, clean)
    if forms:
        clean = "".join(_clean_piece(piece, forms) for piece in _pieces(clean))
    return text if clean == text else clean


def _clean_piece(piece: str, forms: Sequence[SecretForm]) -> str:
    for form in forms:
        piece = form.pattern.sub(form.replacement, piece)
    return piece


def _pieces(text: str) -> Iterator[str]:
    """Yield the text in pieces. A thread holds the GIL while it searches in one piece, and other threads run between
    two pieces.

    A piece ends before white space. Only a word of more than 65,536 characters is cut. A key at the cut may not be
    recognised.
    """
    start = 0
    while len(text) - start > 2 * _PIECE:
        found = _CUT.search(text, start + _PIECE, start + 2 * _PIECE)
        end = found.start() if found else start + 2 * _PIECE
        yield text[start:end]
        start = end
    yield text[start:]


def storable_text(text: str | None) -> str | None:
    """Return a text without secrets and without characters that databases refuse."""
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
    """Return a text without secrets. The text is given as bytes in any encoding that extends ASCII, and returned in the
    same encoding."""
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
