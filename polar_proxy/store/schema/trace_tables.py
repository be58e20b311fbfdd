"""Training sequences with their origin, and the curves of training runs."""

from __future__ import annotations

from sqlalchemy import Column, Double, ForeignKey, Index, Integer, LargeBinary, Table, Text

from polar_proxy.store.schema.base import json_column, metadata

traces = Table(
    "traces",
    metadata,
    Column("trace_id", Text, primary_key=True),
    Column("session_id", Text, ForeignKey("sessions.session_id"), nullable=False),
    Column("rollout_id", Text, ForeignKey("rollouts.rollout_id")),
    Column("builder", Text, nullable=False),
    Column("trace_index", Integer, nullable=False),
    Column("prompt_length", Integer, nullable=False),
    Column("length", Integer, nullable=False),
    Column("trained_tokens", Integer, nullable=False),
    Column("reward", Double),
    Column("grade", Text, nullable=False),
    Column("parent_trace_id", Text),  # builder `tree`: the trace that it branches from after `branch_at` tokens
    Column("branch_at", Integer, nullable=False),
    Column("logprobs", LargeBinary),  # rescored values of the sampled positions; null: the values of the calls
    json_column("call_ids"),
    json_column("certificate", nullable=True),
    Column("created_at", Double, nullable=False),
    Index(None, "session_id", "builder", "trace_index"),
    Index(None, "rollout_id", "builder"),
)

trace_spans = Table(
    "trace_spans",
    metadata,
    Column("trace_id", Text, ForeignKey("traces.trace_id", ondelete="CASCADE"), primary_key=True),
    Column("position", Integer, primary_key=True, autoincrement=False),
    Column("kind", Text, nullable=False),  # context, sampled
    Column("call_id", Text, ForeignKey("calls.call_id"), nullable=False),
    Column("choice_index", Integer, nullable=False),
    Column("start_token", Integer, nullable=False),  # position in the prompt (context) or the answer (sampled)
    Column("end_token", Integer, nullable=False),  # position after the last token
)

exclusions = Table(
    "exclusions",
    metadata,
    Column("session_id", Text, ForeignKey("sessions.session_id"), primary_key=True),
    Column("builder", Text, primary_key=True),
    Column("call_id", Text, ForeignKey("calls.call_id"), primary_key=True),
    Column("reason", Text, nullable=False),
)

training_runs = Table(
    "training_runs",
    metadata,
    Column("run_id", Text, primary_key=True),
    Column("name", Text, nullable=False),
    json_column("config"),
    Column("created_at", Double, nullable=False),
)

training_lines = Table(
    "training_lines",
    metadata,
    Column("run_id", Text, ForeignKey("training_runs.run_id", ondelete="CASCADE"), primary_key=True),
    Column("position", Integer, primary_key=True, autoincrement=False),
    Column("kind", Text, nullable=False),  # start, step, sync, checkpoint, eval
    Column("step", Integer, nullable=False),
    Column("at", Double, nullable=False),
    json_column("data"),
    Index(None, "run_id", "step"),
)
