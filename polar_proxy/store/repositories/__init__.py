"""Repositories. Each has the queries on a few related tables."""
