"""Maintenance of a database: statistics, the integrity check, pruning, vacuum and archives."""
