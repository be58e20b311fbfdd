"""Every route of the API, once. The shapes are those of `models`; `docs/api.md` has an example of each."""

from __future__ import annotations

from typing import Any, Literal, TypeVar
from uuid import uuid4

from pydantic import BaseModel

from polar_proxy import api_models as m
from polar_proxy.client.requests import ApiCall, ApiStream, api_method, api_stream, quote_segment
from polar_proxy.client.streams import EventDecoder, RowDecoder
from polar_proxy.types import Json

M = TypeVar("M", bound=BaseModel)
Builder = Literal["merged", "per_call", "tree", "rescored"]


def _get(path: str, answer: type[M], **params: Any) -> ApiCall[M]:
    return ApiCall("GET", path, answer.model_validate_json, params, repeatable=True)


def _post(path: str, answer: type[M], body: BaseModel | None = None, **rest: Any) -> ApiCall[M]:
    """`rest`: as `ApiCall` has it. What was not given is not sent: the server's own defaults hold."""
    json = None if body is None else body.model_dump(mode="json", exclude_unset=True)
    return ApiCall("POST", path, answer.model_validate_json, json=json, **rest)


class ApiMethods:
    """The methods of `Client`, and awaited or iterated asynchronously of `AsyncClient`."""

    # Jobs

    @api_method
    def submit(self, request: m.JobRequest, *, idempotency_key: str | None = None) -> ApiCall[m.SubmittedJob]:
        """Queue a job. Said twice under one key it is one job; without a key this call makes its own, so that trying
        again after a lost answer makes no second job."""
        key = {"idempotency-key": idempotency_key or f"client-{uuid4()}"}
        return _post("/jobs", m.SubmittedJob, request, headers=key, repeatable=True)

    @api_method
    def jobs(
        self, *, state: str | None = None, limit: int | None = None, before: str | None = None
    ) -> ApiCall[m.JobList]:
        """Newest first. `before`: the page behind this job."""
        return _get("/jobs", m.JobList, state=state, limit=limit, before=before)

    @api_method
    def job(self, job_id: str) -> ApiCall[m.JobDetail]:
        """A job and its groups."""
        return _get(f"/jobs/{quote_segment(job_id)}", m.JobDetail)

    @api_method
    def job_rollouts(self, job_id: str) -> ApiCall[m.RolloutList]:
        """A job's rollouts, in the order of submission."""
        return _get(f"/jobs/{quote_segment(job_id)}/rollouts", m.RolloutList)

    @api_method
    def cancel(self, what: str) -> ApiCall[m.CancelResponse]:
        """End a job, a group or a rollout, whatever stage it is in."""
        room = "jobs" if what.startswith("job_") else "groups" if what.startswith("group_") else "rollouts"
        return _post(f"/{room}/{quote_segment(what)}/cancel", m.CancelResponse, repeatable=True)

    @api_method
    def pause(self, job_id: str, *, seconds: float | None = None, wait_idle: float | None = None) -> ApiCall[m.Job]:
        """Begin nothing new of a job, for ever or for `seconds`. With `wait_idle` the answer comes when nothing of it
        runs any more; raises ConflictError (code `pause_timed_out`) after so many seconds, and nothing stays paused."""
        request = m.PauseRequest(seconds=seconds, wait_idle=wait_idle)
        waits = wait_idle or 0.0
        path = f"/jobs/{quote_segment(job_id)}/pause"
        return _post(path, m.Job, request, repeatable=True, waits=waits)

    @api_method
    def resume(self, job_id: str) -> ApiCall[m.Job]:
        return _post(f"/jobs/{quote_segment(job_id)}/resume", m.Job, repeatable=True)

    @api_stream
    def events(self, job_id: str | None = None, *, after: str | None = None) -> ApiStream[m.Event]:
        """What happens, of one job until it has ended (last event: `end`) or of all for ever. A lost connection is
        made again and nothing is told twice or left out. `after`: the id of the last event that was seen."""
        return ApiStream("/events", lambda: EventDecoder(after), {"job": job_id})

    # Groups, rollouts, rewards

    @api_method
    def group(self, group_id: str) -> ApiCall[m.GroupDetail]:
        """A group with all its rollouts, those without a trace among them."""
        return _get(f"/groups/{quote_segment(group_id)}", m.GroupDetail)

    @api_stream
    def group_trajectories(
        self, group_id: str, *, builder: Builder = "merged", all_grades: bool = False
    ) -> ApiStream[Json]:
        """One row a trace, as `polar export --format tokens-jsonl` writes them."""
        params = {"builder": builder, "all_grades": all_grades}
        return ApiStream(f"/groups/{quote_segment(group_id)}/trajectories", RowDecoder, params)

    @api_method
    def rollouts(
        self, *, where: str | None = None, limit: int | None = None, before: str | None = None
    ) -> ApiCall[m.RolloutList]:
        """Those that fulfil a condition such as `reward>=1, harness=codex`. A page has its oldest first; the page
        before it is asked for by its first id."""
        return _get("/rollouts", m.RolloutList, where=where, limit=limit, before=before)

    @api_method
    def rollout(self, rollout_id: str) -> ApiCall[m.RolloutDetail]:
        """A rollout with the stages of its attempts and all its rewards."""
        return _get(f"/rollouts/{quote_segment(rollout_id)}", m.RolloutDetail)

    @api_stream
    def trajectory(self, rollout_id: str, *, builder: Builder = "merged", all_grades: bool = False) -> ApiStream[Json]:
        """As `group_trajectories`, of one rollout."""
        params = {"builder": builder, "all_grades": all_grades}
        return ApiStream(f"/rollouts/{quote_segment(rollout_id)}/trajectory", RowDecoder, params)

    @api_method
    def reward(self, request: m.RewardRequest) -> ApiCall[m.Reward]:
        """Give a reward from outside. Earlier ones stay; the newest of the rollout itself is its reward. Not tried
        again where the answer was lost: look at `rollout` whether it came."""
        return _post("/rewards", m.Reward, request)

    @api_method
    def new_session(self, request: m.SessionRequest) -> ApiCall[m.CreatedSession]:
        """A session key for an agent that no rollout starts. The key is told once."""
        return _post("/sessions", m.CreatedSession, request)

    # The trainer's feed

    @api_method
    def lease(self, request: m.LeaseRequest) -> ApiCall[m.LeaseResponse]:
        """Finished groups, which nobody else gets while the leases last. With `request.wait` the answer may take so
        long."""
        return _post("/feed/lease", m.LeaseResponse, request, waits=request.wait)

    @api_method
    def acknowledge(self, lease_id: str) -> ApiCall[m.LeaseEndResponse]:
        """The group was trained on and is never offered again. Raises LeaseLostError where the lease has run out."""
        return _post(f"/feed/leases/{quote_segment(lease_id)}/ack", m.LeaseEndResponse, repeatable=True)

    @api_method
    def give_back(self, lease_id: str) -> ApiCall[m.LeaseEndResponse]:
        """The group will not be used: it is offered again. Raises LeaseLostError where the lease has run out."""
        return _post(f"/feed/leases/{quote_segment(lease_id)}/return", m.LeaseEndResponse, repeatable=True)

    @api_method
    def extend(self, lease_id: str, seconds: float) -> ApiCall[m.LeaseExtendResponse]:
        """Keep the group for so long from now. Raises LeaseLostError where the lease has run out."""
        request = m.ExtendRequest(seconds=seconds)
        path = f"/feed/leases/{quote_segment(lease_id)}/extend"
        return _post(path, m.LeaseExtendResponse, request, repeatable=True)

    @api_method
    def feed(self) -> ApiCall[m.FeedState]:
        """How many groups the feed has in which state, and why some were dropped."""
        return _get("/feed", m.FeedState)

    # Training runs

    @api_method
    def put_training_run(self, run_id: str, request: m.TrainingRunRequest) -> ApiCall[m.TrainingRun]:
        """Make a run known, or take it up, with all its lines."""
        path, json = f"/training/{quote_segment(run_id)}", request.model_dump(mode="json")
        return ApiCall("PUT", path, m.TrainingRun.model_validate_json, json=json, repeatable=True)

    @api_method
    def add_training_lines(self, run_id: str, request: m.TrainingLinesRequest) -> ApiCall[m.TrainingRun]:
        """Lines behind those that are known. Raises ConflictError where some before them are missing."""
        return _post(f"/training/{quote_segment(run_id)}/lines", m.TrainingRun, request, repeatable=True)

    @api_method
    def training_runs(self) -> ApiCall[m.TrainingRunList]:
        """Newest first."""
        return _get("/training", m.TrainingRunList)

    @api_method
    def training_run(self, run_id: str) -> ApiCall[m.TrainingRunDetail]:
        """A run's settings, and its curves."""
        return _get(f"/training/{quote_segment(run_id)}", m.TrainingRunDetail)

    # The server

    @api_method
    def service(self) -> ApiCall[m.ServiceState]:
        """What the server is, and what its rollout service has in hand."""
        return _get("/service", m.ServiceState)

    @api_method
    def pause_service(
        self, *, seconds: float | None = None, wait_idle: float | None = None, scope: m.Scope = "server"
    ) -> ApiCall[m.ServiceState]:
        """As `pause`, of all jobs in this server, or in all servers on its database."""
        request = m.ServicePauseRequest(seconds=seconds, wait_idle=wait_idle, scope=scope)
        answer = m.ServiceState
        return _post("/service/pause", answer, request, repeatable=True, waits=wait_idle or 0.0)

    @api_method
    def resume_service(self, *, scope: m.Scope = "server") -> ApiCall[m.ServiceState]:
        """End a pause or a drain of the same scope."""
        return _post("/service/resume", m.ServiceState, m.ServiceResumeRequest(scope=scope), repeatable=True)

    @api_method
    def drain(self, *, timeout: float = 600.0, scope: m.Scope = "server") -> ApiCall[m.ServiceState]:
        """Take nothing new and wait for what is in hand, in this server or in all on its database. Raises ConflictError
        (code `drain_timed_out`, with what is left in `detail`) after `timeout` seconds; work is then taken again."""
        request = m.DrainRequest(timeout=timeout, scope=scope)
        answer = m.ServiceState
        return _post("/service/drain", answer, request, repeatable=True, waits=timeout)
