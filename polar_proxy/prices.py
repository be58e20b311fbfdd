"""Prices of hosted models: the price of a call, from the counts of its tokens (`Usage`).

The price file is TOML: a table `[[model]]` for each model, with its prices in US dollars per million tokens, and with
the date and the source of these prices. Polar ships one (`assets/prices.toml`); the setting `gateway.prices` names
another in its place. The date at the end of a model's name (`-2025-08-07`, `-20250929`, `-001`, `-latest`) is ignored
unless the file names the model with this date.

A call costs the sum of its tokens' prices. The price is None, never 0, if the file does not have the model, or if the
call had another service tier than the standard one. Charges for the provider's own tools, hourly charges and discounts
are not included.
"""

from __future__ import annotations

import re
import tomllib
from datetime import date
from functools import cache
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from polar_proxy.errors import UsageError, first_problem
from polar_proxy.types import Usage

SHIPPED_PRICES = Path(__file__).resolve().parent / "assets" / "prices.toml"
_DATE = re.compile(r"[-@](\d{8}|\d{4}-\d{2}-\d{2}|\d{3}|latest)$")
_MILLION = 1_000_000


class TokenPrices(BaseModel):
    """Prices in US dollars per million tokens."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    input: float = Field(ge=0)
    output: float = Field(ge=0)
    cached_input: float | None = Field(None, ge=0)
    """Price of tokens read from the provider's cache. Default: the price in `input`."""
    cache_write: float | None = Field(None, ge=0)
    """Price of tokens written to the provider's cache. Default: the price in `input`."""
    cache_write_1h: float | None = Field(None, ge=0)
    """Price of tokens written to the provider's cache for one hour. Default: the price in `cache_write`."""

    def of(self, usage: Usage) -> float:
        """Return the price of a call in US dollars."""
        cached, written = usage.cached_tokens or 0, usage.cache_write_tokens or 0
        hour = min(usage.cache_write_1h_tokens or 0, written)
        write = self.input if self.cache_write is None else self.cache_write
        write_hour = write if self.cache_write_1h is None else self.cache_write_1h
        total = max(0, usage.input_tokens - cached - written) * self.input + usage.output_tokens * self.output
        total += cached * (self.input if self.cached_input is None else self.cached_input)
        total += (written - hour) * write + hour * write_hour
        return total / _MILLION


class LongPromptPrices(TokenPrices):
    """Prices of all tokens of a call with a long prompt."""

    above: int = Field(ge=0)
    """Number of prompt tokens above which these prices apply."""


class ModelPrices(TokenPrices):
    """The prices of one model, with their source."""

    name: str
    """The model's name in the provider's answers."""
    date: date
    """The day on which the source listed these prices."""
    source: str
    long: LongPromptPrices | None = None

    def of(self, usage: Usage) -> float:
        if self.long is not None and usage.input_tokens > self.long.above:
            return self.long.of(usage)
        return super().of(usage)


class _PriceFile(BaseModel):
    model_config = ConfigDict(extra="forbid")

    model: list[ModelPrices]


class PriceTable:
    """Prices by model, read from one price file."""

    def __init__(self, path: Path | None = None) -> None:
        """Read the file at `path`; by default the one that Polar ships. Raises UsageError if it cannot be used."""
        self._models = _shipped() if path is None else _read(path)

    def find(self, model: str) -> ModelPrices | None:
        """Return the prices of a model; None if the file does not have it."""
        name = model.removeprefix("models/")
        if name in self._models:
            return self._models[name]
        return self._models.get(_DATE.sub("", name))

    def price(self, usage: Usage | None) -> float | None:
        """Return the price of a call in US dollars; None if it is unknown."""
        if usage is None or usage.model is None or usage.service_tier is not None:
            return None
        prices = self.find(usage.model)
        return None if prices is None else prices.of(usage)


def _read(path: Path) -> dict[str, ModelPrices]:
    try:
        rows = _PriceFile.model_validate(tomllib.loads(path.expanduser().read_text(encoding="utf-8"))).model
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UsageError(f"The price file {path} cannot be read: {error}.") from error
    except ValidationError as error:
        raise UsageError(f"The price file {path} is not valid: {first_problem(error)}.") from error
    models = {row.name: row for row in rows}
    if len(models) < len(rows):
        raise UsageError(f"The price file {path} is not valid: it names a model twice.")
    return models


@cache
def _shipped() -> dict[str, ModelPrices]:
    return _read(SHIPPED_PRICES)
