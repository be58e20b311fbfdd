"""Datasets from the store."""

from polar_proxy.export.rows import FORMATS, Selection
from polar_proxy.export.where import FIELDS, Where, parse_where

__all__ = ["FIELDS", "FORMATS", "Selection", "Where", "parse_where"]
