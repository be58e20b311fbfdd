"""Datasets from the store. `exporter.export` makes them."""
