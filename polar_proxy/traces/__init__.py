"""Traces: from recorded calls to training sequences.

builders     calls -> traces            validation  the check of a build
grades       calls that are not trained, and how far a trace can be trusted
drift        prompts that differ, and why
certificate  what proves a trace        rows        traces as JSON lines
check        the checker of a file of rows
scoring      log-probabilities from an engine
audit        recorded against fresh     operations  all of it on a store
"""
