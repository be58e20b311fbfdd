"""Every route of the API, once. The shapes are those of `models`; `docs/api.md` has an example of each."""

from __future__ import annotations

from typing import Any, Literal, TypeVar
from uuid import uuid4

from pydantic import BaseModel

from polar_proxy.client import models as m
from polar_proxy.client.core import Call, Stream, part, route, streamed
from polar_proxy.client.streams import Events, Rows
from polar_proxy.types import Json

M = TypeVar("M", bound=BaseModel)
Builder = Literal["merged", "per_call", "tree", "rescored"]


def _get(path: str, answer: type[M], **params: Any) -> Call[M]:
    return Call("GET", path, answer.model_validate_json, params, repeatable=True)


def _post(path: str, answer: type[M], body: BaseModel | None = None, **rest: Any) -> Call[M]:
    """`rest`: as `Call` has it. What was not given is not sent: the server's own defaults hold."""
    json = None if body is None else body.model_dump(mode="json", exclude_unset=True)
    return Call("POST", path, answer.model_validate_json, json=json, **rest)


class Routes:
    """The methods of `Client`, and awaited or iterated asynchronously of `AsyncClient`."""

    # Jobs

    @route
    def submit(self, request: m.JobRequest, *, idempotency_key: str | None = None) -> Call[m.SubmittedJob]:
        """Queue a job. Said twice under one key it is one job; without a key this call makes its own, so that trying
        again after a lost answer makes no second job."""
        key = {"idempotency-key": idempotency_key or f"client-{uuid4()}"}
        return _post("/jobs", m.SubmittedJob, request, headers=key, repeatable=True)

    @route
    def jobs(self, *, state: str | None = None, limit: int | None = None, before: str | None = None) -> Call[m.JobList]:
        """Newest first. `before`: the page behind this job."""
        return _get("/jobs", m.JobList, state=state, limit=limit, before=before)

    @route
    def job(self, job_id: str) -> Call[m.JobDetail]:
        """A job and its groups."""
        return _get(f"/jobs/{part(job_id)}", m.JobDetail)

    @route
    def job_rollouts(self, job_id: str) -> Call[m.RolloutList]:
        """A job's rollouts, in the order of submission."""
        return _get(f"/jobs/{part(job_id)}/rollouts", m.RolloutList)

    @route
    def cancel(self, what: str) -> Call[m.Cancelled]:
        """End a job, a group or a rollout, whatever stage it is in."""
        room = "jobs" if what.startswith("job_") else "groups" if what.startswith("group_") else "rollouts"
        return _post(f"/{room}/{part(what)}/cancel", m.Cancelled, repeatable=True)

    @route
    def pause(self, job_id: str, *, seconds: float | None = None, wait_idle: float | None = None) -> Call[m.Job]:
        """Begin nothing new of a job, for ever or for `seconds`. With `wait_idle` the answer comes when nothing of it
        runs any more; raises ConflictError (code `pause_timed_out`) after so many seconds, and nothing stays paused."""
        request = m.PauseRequest(seconds=seconds, wait_idle=wait_idle)
        waits = wait_idle or 0.0
        path = f"/jobs/{part(job_id)}/pause"
        return _post(path, m.Job, request, repeatable=True, waits=waits)

    @route
    def resume(self, job_id: str) -> Call[m.Job]:
        return _post(f"/jobs/{part(job_id)}/resume", m.Job, repeatable=True)

    @streamed
    def events(self, job_id: str | None = None, *, after: str | None = None) -> Stream[m.Event]:
        """What happens, of one job until it has ended (last event: `end`) or of all for ever. A lost connection is
        made again and nothing is told twice or left out. `after`: the id of the last event that was seen."""
        return Stream("/events", lambda: Events(after), {"job": job_id})

    # Groups, rollouts, rewards

    @route
    def group(self, group_id: str) -> Call[m.GroupDetail]:
        """A group with all its rollouts, those without a trace among them."""
        return _get(f"/groups/{part(group_id)}", m.GroupDetail)

    @streamed
    def group_trajectories(
        self, group_id: str, *, builder: Builder = "merged", all_grades: bool = False
    ) -> Stream[Json]:
        """One row a trace, as `polar export --format tokens-jsonl` writes them."""
        params = {"builder": builder, "all_grades": all_grades}
        return Stream(f"/groups/{part(group_id)}/trajectories", Rows, params)

    @route
    def rollouts(
        self, *, where: str | None = None, limit: int | None = None, before: str | None = None
    ) -> Call[m.RolloutList]:
        """Those that fulfil a condition such as `reward>=1, harness=codex`. A page has its oldest first; the page
        before it is asked for by its first id."""
        return _get("/rollouts", m.RolloutList, where=where, limit=limit, before=before)

    @route
    def rollout(self, rollout_id: str) -> Call[m.RolloutDetail]:
        """A rollout with the stages of its attempts and all its rewards."""
        return _get(f"/rollouts/{part(rollout_id)}", m.RolloutDetail)

    @streamed
    def trajectory(self, rollout_id: str, *, builder: Builder = "merged", all_grades: bool = False) -> Stream[Json]:
        """As `group_trajectories`, of one rollout."""
        params = {"builder": builder, "all_grades": all_grades}
        return Stream(f"/rollouts/{part(rollout_id)}/trajectory", Rows, params)

    @route
    def reward(self, request: m.RewardRequest) -> Call[m.Reward]:
        """Give a reward from outside. Earlier ones stay; the newest of the rollout itself is its reward. Not tried
        again where the answer was lost: look at `rollout` whether it came."""
        return _post("/rewards", m.Reward, request)

    @route
    def new_session(self, request: m.SessionRequest) -> Call[m.Session]:
        """A session key for an agent that no rollout starts. The key is told once."""
        return _post("/sessions", m.Session, request)

    # The trainer's feed

    @route
    def lease(self, request: m.LeaseRequest) -> Call[m.Offer]:
        """Finished groups, which nobody else gets while the leases last. With `request.wait` the answer may take so
        long."""
        return _post("/feed/lease", m.Offer, request, waits=request.wait)

    @route
    def acknowledge(self, lease_id: str) -> Call[m.LeaseEnded]:
        """The group was trained on and is never offered again. Raises LeaseLostError where the lease has run out."""
        return _post(f"/feed/leases/{part(lease_id)}/ack", m.LeaseEnded, repeatable=True)

    @route
    def give_back(self, lease_id: str) -> Call[m.LeaseEnded]:
        """The group will not be used: it is offered again. Raises LeaseLostError where the lease has run out."""
        return _post(f"/feed/leases/{part(lease_id)}/return", m.LeaseEnded, repeatable=True)

    @route
    def extend(self, lease_id: str, seconds: float) -> Call[m.LeaseExtended]:
        """Keep the group for so long from now. Raises LeaseLostError where the lease has run out."""
        request = m.ExtendRequest(seconds=seconds)
        path = f"/feed/leases/{part(lease_id)}/extend"
        return _post(path, m.LeaseExtended, request, repeatable=True)

    @route
    def feed(self) -> Call[m.FeedState]:
        """How many groups the feed has in which state, and why some were dropped."""
        return _get("/feed", m.FeedState)

    # Training runs

    @route
    def put_training_run(self, run_id: str, request: m.TrainingRunRequest) -> Call[m.TrainingRun]:
        """Make a run known, or take it up, with all its lines."""
        path, json = f"/training/{part(run_id)}", request.model_dump(mode="json")
        return Call("PUT", path, m.TrainingRun.model_validate_json, json=json, repeatable=True)

    @route
    def add_training_lines(self, run_id: str, request: m.TrainingLinesRequest) -> Call[m.TrainingRun]:
        """Lines behind those that are known. Raises ConflictError where some before them are missing."""
        return _post(f"/training/{part(run_id)}/lines", m.TrainingRun, request, repeatable=True)

    @route
    def training_runs(self) -> Call[m.TrainingRunList]:
        """Newest first."""
        return _get("/training", m.TrainingRunList)

    @route
    def training_run(self, run_id: str) -> Call[m.TrainingDetail]:
        """A run's settings, and its curves."""
        return _get(f"/training/{part(run_id)}", m.TrainingDetail)

    # The server

    @route
    def service(self) -> Call[m.ServiceState]:
        """What the server is, and what its rollout service has in hand."""
        return _get("/service", m.ServiceState)

    @route
    def pause_service(
        self, *, seconds: float | None = None, wait_idle: float | None = None, scope: m.Scope = "server"
    ) -> Call[m.ServiceState]:
        """As `pause`, of all jobs in this server, or in all servers on its database."""
        request = m.ServicePauseRequest(seconds=seconds, wait_idle=wait_idle, scope=scope)
        answer = m.ServiceState
        return _post("/service/pause", answer, request, repeatable=True, waits=wait_idle or 0.0)

    @route
    def resume_service(self, *, scope: m.Scope = "server") -> Call[m.ServiceState]:
        """End a pause or a drain of the same scope."""
        return _post("/service/resume", m.ServiceState, m.ServiceResumeRequest(scope=scope), repeatable=True)

    @route
    def drain(self, *, timeout: float = 600.0, scope: m.Scope = "server") -> Call[m.ServiceState]:
        """Take nothing new and wait for what is in hand, in this server or in all on its database. Raises ConflictError
        (code `drain_timed_out`, with what is left in `detail`) after `timeout` seconds; work is then taken again."""
        request = m.DrainRequest(timeout=timeout, scope=scope)
        answer = m.ServiceState
        return _post("/service/drain", answer, request, repeatable=True, waits=timeout)
