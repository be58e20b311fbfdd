"""Tasks, jobs, groups, rollouts and what belongs to them: stages, leases, events, artifacts, rewards, remarks."""

from __future__ import annotations

from typing import Literal, get_args

from sqlalchemy import BigInteger, Boolean, Column, Double, ForeignKey, Index, Integer, Table, Text, text

from polar_proxy.store.schema.base import json_column, metadata, serial

RolloutStatus = Literal[
    "queued", "preparing", "ready", "running", "scoring", "done", "failed", "cancelled", "timed_out"
]
ROLLOUT_STATUSES: frozenset[str] = frozenset(get_args(RolloutStatus))
FINAL_STATUSES: frozenset[str] = frozenset({"done", "failed", "cancelled", "timed_out"})

tasks = Table(
    "tasks",
    metadata,
    Column("task_id", Text, primary_key=True),
    Column("family", Text, nullable=False),
    Column("seed", BigInteger),
    Column("instruction", Text, nullable=False),
    json_column("spec"),
    Column("created_at", Double, nullable=False),
)

jobs = Table(
    "jobs",  # groups of rollouts that were submitted together
    metadata,
    Column("job_id", Text, primary_key=True),
    Column("idempotency_key", Text, unique=True),
    Column("label", Text),
    json_column("spec"),
    Column("priority", Integer, nullable=False),
    Column("status", Text, nullable=False, index=True),  # open, paused, done, cancelled
    Column("error", Text),
    Column("created_at", Double, nullable=False),
    Column("ended_at", Double),
    Column("paused_until", Double),  # end of a pause; null: paused until it is resumed
    Column("callback_url", Text),  # is notified when one of its groups or the job ends
)

groups = Table(
    "groups",
    metadata,
    Column("group_id", Text, primary_key=True),
    Column("task_id", Text, ForeignKey("tasks.task_id"), nullable=False, index=True),
    Column("rollout_count", Integer, nullable=False),  # rollouts that were queued
    json_column("config"),
    Column("created_at", Double, nullable=False),
    Column("job_id", Text, index=True),
    Column("group_size", Integer, nullable=False),  # rollouts that complete the group
    Column("status", Text, nullable=False, server_default="open"),  # open, finished, cancelled
    Column("reason", Text),  # why the group was stopped early or dropped
    Column("ended_at", Double),
    Column("delivery", Text, index=True),  # open, waiting, leased, delivered, dropped; null: not for training
    Column("max_staleness", Integer),  # largest staleness in policy versions; null: no limit
)

rollouts = Table(
    "rollouts",
    metadata,
    Column("rollout_id", Text, primary_key=True),
    Column("group_id", Text, ForeignKey("groups.group_id"), nullable=False, index=True),
    Column("task_id", Text, ForeignKey("tasks.task_id"), nullable=False, index=True),
    Column("group_index", Integer, nullable=False),
    Column("session_id", Text, ForeignKey("sessions.session_id"), index=True),
    Column("status", Text, nullable=False, index=True),
    Column("incomplete", Boolean, nullable=False, server_default="0"),  # a call was lost, so it is never trained on
    Column("reward", Double),  # the newest reward of the rollout; all rewards are in `rewards`
    Column("label", Text),  # the newest label that a person gave; all are in `remarks`
    Column("rating", Double),  # the newest rating, 1 to 5
    Column("exit_code", Integer),
    Column("error", Text),
    Column("harness", Text, nullable=False),
    Column("sandbox", Text, nullable=False),
    Column("engine", Text, nullable=False),
    Column("model", Text, nullable=False),
    Column("seed", BigInteger),
    json_column("config"),
    Column("owner_host", Text),  # the process that runs it, so that a restart finds interrupted rollouts
    Column("owner_pid", BigInteger),
    Column("job_id", Text, index=True),
    Column("attempt", Integer, nullable=False, server_default="1"),
    Column("cause", Text),  # machine-readable cause of the failure or of the last retry
    Column("masked", Boolean, nullable=False, server_default="0"),  # counts in the baseline, but is not trained on
    Column("claimed_by", Text, index=True),  # the worker; without a heartbeat it loses the claim at `lease_expires_at`
    Column("lease_expires_at", Double),
    Column("policy_version", Text),  # when the rollout was claimed
    Column("created_at", Double, nullable=False),
    Column("started_at", Double),  # when the agent started
    Column("ended_at", Double),  # when it reached a final status
)

rollout_is_final = rollouts.c.status.in_(sorted(FINAL_STATUSES))
"""SQL condition: the rollout has a final status."""

stages = Table(
    "stages",
    metadata,
    Column("rollout_id", Text, ForeignKey("rollouts.rollout_id"), primary_key=True),
    Column("attempt", Integer, primary_key=True, autoincrement=False),
    Column("stage", Text, primary_key=True),
    Column("started_at", Double, nullable=False),
    Column("ended_at", Double),
    Column("outcome", Text),
    Column("cause", Text),
    Column("worker", Text),
)

leases = Table(
    "leases",
    metadata,
    Column("lease_id", Text, primary_key=True),
    Column("group_id", Text, ForeignKey("groups.group_id"), nullable=False, index=True),
    Column("consumer", Text, nullable=False),
    Column("policy_version", Text),  # of the trainer when it took the lease
    Column("leased_at", Double, nullable=False),
    Column("expires_at", Double, nullable=False),
    Column("ended_at", Double),
    Column("outcome", Text),  # acknowledged, returned, expired
)

OPEN_LEASE = text("ended_at IS NULL")

open_leases = Index("uq_leases_group_id_open", leases.c.group_id, unique=True, sqlite_where=OPEN_LEASE)
"""A group has at most one open lease, also when two servers write at the same time.

The migration adds the argument `postgresql_where`. With this argument here, SQLAlchemy would import PostgreSQL's
dialect even for SQLite."""

callbacks = Table(
    "callbacks",  # requests to the callback URLs of jobs, sent and to be sent
    metadata,
    Column("callback_id", Text, primary_key=True),
    Column("job_id", Text, nullable=False, index=True),
    Column("group_id", Text),
    Column("kind", Text, nullable=False),  # group.finished, group.cancelled, job.ended
    Column("body", Text),  # fixed at the first attempt; null: not attempted yet
    Column("attempts", Integer, nullable=False, server_default="0"),
    Column("created_at", Double, nullable=False),
    Column("next_attempt_at", Double, index=True),  # null: delivered, or given up
    Column("delivered_at", Double),
    Column("error", Text),  # error of the last attempt
)

job_events = Table(
    "job_events",  # status changes of jobs and groups; those of rollouts are in `rollout_events`
    metadata,
    Column("job_event_id", serial, primary_key=True, autoincrement=True),
    Column("job_id", Text, nullable=False, index=True),
    Column("group_id", Text),
    Column("at", Double, nullable=False),
    Column("kind", Text, nullable=False),  # job, group, feed
    json_column("data"),
)

rollout_events = Table(
    "rollout_events",
    metadata,
    Column("event_id", serial, primary_key=True, autoincrement=True),
    Column("rollout_id", Text, ForeignKey("rollouts.rollout_id"), nullable=False, index=True),
    Column("at", Double, nullable=False),
    Column("kind", Text, nullable=False),
    json_column("data"),
)

artifacts = Table(
    "artifacts",
    metadata,
    Column("artifact_id", Text, primary_key=True),
    Column("rollout_id", Text, ForeignKey("rollouts.rollout_id"), nullable=False, index=True),
    Column("name", Text, nullable=False),
    Column("sha256", Text, nullable=False),  # stored as artifacts/<first two digits>/<sha256>
    Column("bytes", BigInteger, nullable=False),
    Column("created_at", Double, nullable=False),
)

rewards = Table(
    "rewards",
    metadata,
    Column("reward_id", Text, primary_key=True),
    # One of the two is set: the rewards of a session that has a rollout are stored with the rollout.
    Column("rollout_id", Text, ForeignKey("rollouts.rollout_id"), index=True),
    Column("session_id", Text, ForeignKey("sessions.session_id"), index=True),
    # No foreign keys: a reward outlives its trace, which a later build may replace.
    Column("trace_id", Text),
    Column("call_id", Text),
    Column("source", Text, nullable=False),
    Column("value", Double),  # null: the evaluator returned no value
    json_column("detail"),
    Column("created_at", Double, nullable=False),
)

remarks = Table(
    "remarks",  # labels, notes and ratings that people gave
    metadata,
    Column("remark_id", Text, primary_key=True),
    # One of the two is set.
    Column("rollout_id", Text, ForeignKey("rollouts.rollout_id"), index=True),
    Column("session_id", Text, ForeignKey("sessions.session_id"), index=True),
    Column("kind", Text, nullable=False),  # label, note, rating
    Column("text", Text),
    Column("value", Double),  # of a rating
    Column("author", Text, nullable=False),  # the API key that gave it
    Column("created_at", Double, nullable=False),
)

fleet = Table(
    "fleet",  # one row: whether all servers on this database are paused; read by every claim
    metadata,
    Column("fleet_id", Integer, primary_key=True, autoincrement=False),  # 1
    Column("paused_at", Double),  # null: not paused
    Column("paused_until", Double),  # end of the pause; null: paused until it is resumed
)
