"""Conversion of calls to rows and back: packed cells, chains of shared content, serializer and loader."""
