"""Datasets from the store."""

from polar_proxy.export.rows import FORMATS, Selection, conversation
from polar_proxy.export.write import Report, export

__all__ = ["FORMATS", "Report", "Selection", "conversation", "export"]
