"""Repositories: the queries on a few related tables each."""
