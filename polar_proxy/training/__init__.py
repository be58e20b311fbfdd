"""Algorithms of GRPO-style training: small pure functions, each with its formula and its source.

`advantages` and `selection` work on the rewards of groups (numpy). `losses`, `corrections` and `auxiliary` work on
per-token tensors (torch), `normalise` says what each token weighs. `tree` and `packing` lay sequences that share
prefixes out so that each prefix is computed once (numpy); `attention` and `branches` hand them to a model (torch).
`algorithms` names them. docs/algorithms.md is the table of all.
"""
