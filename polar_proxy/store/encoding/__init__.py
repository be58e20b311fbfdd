"""How calls become rows and rows become calls: packed cells, chains of shared content, serializer and loader."""
