"""The methods of both clients, one for each route of the API. `docs/reference/api_examples.md` has an example of
each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, TypeVar
from uuid import uuid4

from pydantic import BaseModel

from polar_proxy import api_models as m
from polar_proxy.client.requests import (
    ApiCall,
    ApiStream,
    EventDecoder,
    ExportDecoder,
    QueryParams,
    RowDecoder,
    api_method,
    quote_segment,
)
from polar_proxy.types import Json

M = TypeVar("M", bound=BaseModel)
Builder = Literal["merged", "per_call", "tree", "rescored"]


def _get(path: str, response: type[M], **params: Any) -> ApiCall[M]:
    return ApiCall("GET", path, response.model_validate_json, params, idempotent=True)


def _post(path: str, response: type[M], body: BaseModel | None = None, **rest: Any) -> ApiCall[M]:
    """Return a POST request. Unset fields of `body` are omitted, so that the server's defaults apply."""
    json = None if body is None else body.model_dump(mode="json", exclude_unset=True)
    return ApiCall("POST", path, response.model_validate_json, json=json, **rest)


class ApiMethods:
    """The methods of `Client`. On `AsyncClient` they are awaited, or iterated asynchronously."""

    # Jobs

    @api_method
    def submit(self, request: m.JobRequest, *, idempotency_key: str | None = None) -> ApiCall[m.SubmittedJob]:
        """Queue a job. Submitting again with the same `idempotency_key` returns the same job.

        Without a key, the client generates one, so that its own retries create no second job.
        """
        key = {"idempotency-key": idempotency_key or f"client-{uuid4()}"}
        return _post("/jobs", m.SubmittedJob, request, headers=key, idempotent=True)

    @api_method
    def jobs(
        self, *, state: str | None = None, limit: int | None = None, before: str | None = None
    ) -> ApiCall[m.JobList]:
        """List jobs, newest first. `before`: a job id; list only older jobs."""
        return _get("/jobs", m.JobList, state=state, limit=limit, before=before)

    @api_method
    def job(self, job_id: str) -> ApiCall[m.JobDetail]:
        return _get(f"/jobs/{quote_segment(job_id)}", m.JobDetail)

    @api_method
    def job_rollouts(self, job_id: str) -> ApiCall[m.RolloutList]:
        return _get(f"/jobs/{quote_segment(job_id)}/rollouts", m.RolloutList)

    @api_method
    def cancel(self, target: str) -> ApiCall[m.CancelResponse]:
        """Cancel a job, a group or a rollout by its id, whatever stage its rollouts are in."""
        collection = "jobs" if target.startswith("job_") else "groups" if target.startswith("group_") else "rollouts"
        return _post(f"/{collection}/{quote_segment(target)}/cancel", m.CancelResponse, idempotent=True)

    @api_method
    def pause(self, job_id: str, *, seconds: float | None = None, wait_idle: float | None = None) -> ApiCall[m.Job]:
        """Start no more rollouts of a job, for `seconds` or until it is resumed.

        With `wait_idle` the response comes when none of the job's rollouts runs any more. If that takes longer than
        `wait_idle` seconds, raises ConflictError (code `pause_timed_out`), and the job is as it was before.
        """
        request = m.PauseRequest(seconds=seconds, wait_idle=wait_idle)
        path = f"/jobs/{quote_segment(job_id)}/pause"
        return _post(path, m.Job, request, idempotent=True, server_wait=wait_idle or 0.0)

    @api_method
    def resume(self, job_id: str) -> ApiCall[m.Job]:
        return _post(f"/jobs/{quote_segment(job_id)}/resume", m.Job, idempotent=True)

    @api_method
    def events(self, job_id: str | None = None, *, after: str | None = None) -> ApiStream[m.Event]:
        """Stream the events of one job until the job has ended (the last event is `end`), or the events of all jobs
        without end.

        The client reconnects after a lost connection without missing or repeating an event. `after`: the id of the
        last event seen.
        """
        return ApiStream("/events", lambda: EventDecoder(after), {"job": job_id})

    # Groups, rollouts, rewards

    @api_method
    def group(self, group_id: str) -> ApiCall[m.GroupDetail]:
        """Return a group and all its rollouts, including those without a trace."""
        return _get(f"/groups/{quote_segment(group_id)}", m.GroupDetail)

    @api_method
    def group_trajectories(
        self, group_id: str, *, builder: Builder = "merged", all_grades: bool = False
    ) -> ApiStream[Json]:
        """Stream one row for each trace of a group, as `polar export --format tokens-jsonl` writes it."""
        params = {"builder": builder, "all_grades": all_grades}
        return ApiStream(f"/groups/{quote_segment(group_id)}/trajectories", RowDecoder, params)

    @api_method
    def rollouts(
        self, *, where: str | None = None, limit: int | None = None, before: str | None = None
    ) -> ApiCall[m.RolloutList]:
        """List rollouts that match conditions such as `reward>=1, harness=codex`.

        The newest of these rollouts are returned, sorted from old to new. To get older rollouts, pass the id of the
        first returned rollout as `before`.
        """
        return _get("/rollouts", m.RolloutList, where=where, limit=limit, before=before)

    @api_method
    def rollout(self, rollout_id: str) -> ApiCall[m.RolloutDetail]:
        return _get(f"/rollouts/{quote_segment(rollout_id)}", m.RolloutDetail)

    @api_method
    def trajectory(self, rollout_id: str, *, builder: Builder = "merged", all_grades: bool = False) -> ApiStream[Json]:
        """Stream one row for each trace of a rollout."""
        params = {"builder": builder, "all_grades": all_grades}
        return ApiStream(f"/rollouts/{quote_segment(rollout_id)}/trajectory", RowDecoder, params)

    @api_method
    def reward(self, request: m.RewardRequest) -> ApiCall[m.Reward]:
        """Add a reward. Earlier rewards are kept; the rollout's reward is the newest one given to the rollout as a
        whole.

        If the response is lost, the client does not retry: call `rollout` to see whether the reward was stored.
        """
        return _post("/rewards", m.Reward, request)

    @api_method
    def remark(self, request: m.RemarkRequest) -> ApiCall[m.Remark]:
        """Give a label, a note or a rating to a rollout or a session. The client's key is recorded as the author."""
        return _post("/remarks", m.Remark, request)

    @api_method
    def new_session(self, request: m.SessionRequest) -> ApiCall[m.CreatedSession]:
        """Create a session and its key, for an agent that you start yourself. The key is shown once."""
        return _post("/sessions", m.CreatedSession, request)

    @api_method
    def sessions(self, *, limit: int | None = None, before: str | None = None) -> ApiCall[m.SessionList]:
        """List sessions, newest first. `before`: a session id; list only older sessions."""
        return _get("/sessions", m.SessionList, limit=limit, before=before)

    @api_method
    def record(self, name: str, *, tokens: bool = False) -> ApiCall[m.Record]:
        """Return a rollout, a session or a call in full.

        `name`: an id, a session's label, the beginning of an id or label, or `last` for the session that was used last.
        `tokens`: also return the sampled tokens with their texts.
        """
        return _get("/records", m.Record, name=name, tokens=tokens)

    @api_method
    def export(
        self,
        form: str = "jsonl",
        *,
        where: str | None = None,
        sessions: Sequence[str] = (),
        builder: Builder = "merged",
        all_grades: bool = False,
        advantage: str = "grpo",
    ) -> ApiStream[bytes | m.ExportSummary]:
        """Stream an export: the lines that `polar export --format FORM` writes, and an `ExportSummary` at the end."""
        params: QueryParams = {
            "format": form,
            "where": where,
            "session": sessions,
            "builder": builder,
            "all_grades": all_grades,
            "advantage": advantage,
        }
        return ApiStream("/export", ExportDecoder, params)

    # Keys of the API

    @api_method
    def new_key(self, request: m.KeyRequest) -> ApiCall[m.CreatedKey]:
        """Create an API key. The key is shown once."""
        return _post("/keys", m.CreatedKey, request)

    @api_method
    def keys(self) -> ApiCall[m.KeyList]:
        return _get("/keys", m.KeyList)

    @api_method
    def revoke_key(self, key_name: str) -> ApiCall[m.ApiKey]:
        return _post(f"/keys/{quote_segment(key_name)}/revoke", m.ApiKey, idempotent=True)

    # The trainer's feed

    @api_method
    def lease(self, request: m.LeaseRequest) -> ApiCall[m.LeaseResponse]:
        """Lease finished groups: no other consumer gets them until the leases expire.

        With `request.wait`, the server waits up to this many seconds for a finished group.
        """
        return _post("/feed/lease", m.LeaseResponse, request, server_wait=request.wait)

    @api_method
    def acknowledge(self, lease_id: str) -> ApiCall[m.LeaseEndResponse]:
        """Report that the group was trained on. Raises LeaseLostError if the lease has expired or was returned."""
        return _post(f"/feed/leases/{quote_segment(lease_id)}/ack", m.LeaseEndResponse, idempotent=True)

    @api_method
    def give_back(self, lease_id: str) -> ApiCall[m.LeaseEndResponse]:
        """Give back a leased group unused, so that others can lease it. Raises LeaseLostError if the lease has expired
        or was acknowledged."""
        return _post(f"/feed/leases/{quote_segment(lease_id)}/return", m.LeaseEndResponse, idempotent=True)

    @api_method
    def extend(self, lease_id: str, seconds: float) -> ApiCall[m.LeaseExtendResponse]:
        """Renew a lease: it expires `seconds` from now. Raises LeaseLostError if it has ended."""
        request = m.ExtendRequest(seconds=seconds)
        path = f"/feed/leases/{quote_segment(lease_id)}/extend"
        return _post(path, m.LeaseExtendResponse, request, idempotent=True)

    @api_method
    def feed(self) -> ApiCall[m.FeedState]:
        """Return the number of groups in each state of the feed, and why groups were dropped."""
        return _get("/feed", m.FeedState)

    # Training runs

    @api_method
    def put_training_run(self, run_id: str, request: m.TrainingRunRequest) -> ApiCall[m.TrainingRun]:
        """Register a training run with all lines of its metrics log, or replace the lines of a known run."""
        path, json = f"/training/{quote_segment(run_id)}", request.model_dump(mode="json")
        return ApiCall("PUT", path, m.TrainingRun.model_validate_json, json=json, idempotent=True)

    @api_method
    def add_training_lines(self, run_id: str, request: m.TrainingLinesRequest) -> ApiCall[m.TrainingRun]:
        """Append lines of the metrics log. Raises ConflictError if the server lacks lines before these."""
        return _post(f"/training/{quote_segment(run_id)}/lines", m.TrainingRun, request, idempotent=True)

    @api_method
    def training_runs(self) -> ApiCall[m.TrainingRunList]:
        return _get("/training", m.TrainingRunList)

    @api_method
    def training_run(self, run_id: str) -> ApiCall[m.TrainingRunDetail]:
        return _get(f"/training/{quote_segment(run_id)}", m.TrainingRunDetail)

    # The server

    @api_method
    def service(self) -> ApiCall[m.ServiceState]:
        return _get("/service", m.ServiceState)

    @api_method
    def activity(self) -> ApiCall[m.Activity]:
        """Return the activity of all servers: rates of the last minute, active sessions and the newest failures."""
        return _get("/activity", m.Activity)

    @api_method
    def pause_service(
        self, *, seconds: float | None = None, wait_idle: float | None = None, scope: m.Scope = "server"
    ) -> ApiCall[m.ServiceState]:
        """Pause all jobs on this server, or on all servers of its database. The arguments are those of `pause`."""
        request = m.ServicePauseRequest(seconds=seconds, wait_idle=wait_idle, scope=scope)
        return _post("/service/pause", m.ServiceState, request, idempotent=True, server_wait=wait_idle or 0.0)

    @api_method
    def resume_service(self, *, scope: m.Scope = "server") -> ApiCall[m.ServiceState]:
        """End a pause or a drain that was requested with the same `scope`, so that rollouts start again."""
        return _post("/service/resume", m.ServiceState, m.ServiceResumeRequest(scope=scope), idempotent=True)

    @api_method
    def drain(self, *, timeout: float = 600.0, scope: m.Scope = "server") -> ApiCall[m.ServiceState]:
        """Start no more rollouts and wait until none runs, on this server or on all servers of its database.

        If some still run after `timeout` seconds, raises ConflictError (code `drain_timed_out`, their ids in
        `detail["left"]`), and rollouts are started again.
        """
        request = m.DrainRequest(timeout=timeout, scope=scope)
        return _post("/service/drain", m.ServiceState, request, idempotent=True, server_wait=timeout)
