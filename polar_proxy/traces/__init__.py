"""Traces: from recorded calls to training sequences.

builders     calls -> traces            validation  the check of a build
grades       calls that are not trained, and how far a trace can be trusted
drift        prompts that do not begin with the tokens they should continue, and why
certificate  the proof of a trace       rows        traces as JSON lines
check        the checker of a file of rows
scoring      log-probabilities that an engine computes for recorded tokens
audit        recorded log-probabilities compared with fresh ones
operations   build, rebuild, audit and rescore on a store
"""
