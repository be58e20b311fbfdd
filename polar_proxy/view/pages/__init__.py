"""The pages: one file per kind, with its routes."""
