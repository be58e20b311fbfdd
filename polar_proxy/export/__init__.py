"""Datasets from the store."""

from polar_proxy.export.datasets import DATASET_FORMATS, SessionExport, conversation
from polar_proxy.export.exporter import ExportReport, export

__all__ = ["DATASET_FORMATS", "ExportReport", "SessionExport", "conversation", "export"]
