"""The options of a rollout and of a job, each defined once.

`RolloutSpec` has the options of one rollout, `JobSpec` adds the number of rollouts and the options of their groups.
Every other place that names an option is derived from these two models:

* command line: `polar_proxy.cli.options` makes one option for each field;
* settings: the section ``[run]`` has the fields of `RolloutSpec`;
* HTTP API: `JobRequest` has the fields of `JobSpec`;
* database: `rollouts.config` is a `RolloutSpec` as JSON, `jobs.spec` a `JobSpec`;
* worker: an attempt reads the `RolloutSpec` of its claim.

To add an option, add a field here and use it where it matters. A field's docstring is its help text everywhere.
"""

from __future__ import annotations

from typing import Literal, Self

from pydantic import ConfigDict, Field, ValidationError

from polar_proxy.documented import DocumentedModel
from polar_proxy.errors import UsageError, first_problem
from polar_proxy.types import Json

MAX_INTEGER = 2**31 - 1
"""Largest value of an integer option: the largest value of PostgreSQL's type `integer`."""


def whole_distribution(temperature: float) -> Json:
    """Return the parameters for sampling from the model's whole distribution at this temperature, without top_p,
    penalties etc."""
    penalties = {"presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0, "logit_bias": None}
    return {"temperature": temperature, "top_p": 1.0, "top_k": 0, "min_p": 0.0, **penalties}


class SessionBudget(DocumentedModel):
    """Limits on the calls of a session. A field without a value sets no limit."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    max_calls: int | None = Field(None, ge=1, le=MAX_INTEGER)
    """Budget: number of model calls."""
    max_sampled_tokens: int | None = Field(None, ge=1, le=MAX_INTEGER)
    """Budget: number of sampled tokens of all calls. No call starts once this many are sampled."""
    max_prompt_tokens: int | None = Field(None, ge=1, le=MAX_INTEGER)
    """Budget: number of prompt tokens of all calls, cached ones included. No call starts once this many are used."""
    max_price_usd: float | None = Field(None, gt=0)
    """Budget: price in US dollars of all hosted calls whose price is known. No call starts once this much is spent."""
    max_idle_seconds: float | None = Field(None, gt=0)
    """Budget: seconds without a call, from the end of one call to the start of the next."""
    max_repeats: int | None = Field(None, ge=2, le=MAX_INTEGER)
    """Budget: number of equal calls. This limit stops an agent in a loop. Calls are equal if they have the same
    request, or if they follow each other and have the same answer."""
    at_budget: Literal["refuse", "stop"] = "refuse"
    """Answer to calls after a budget is spent: refuse (an error), or stop (a text by Polar that asks the agent to
    finish; after ten such answers, an error). This text is never trained on."""

    def as_policy(self) -> Json:
        """Return the limits that are set, for the policy of a session; empty if no limit is set."""
        given = {name: value for name in SessionBudget.model_fields if (value := getattr(self, name)) is not None}
        return {} if given.keys() == {"at_budget"} else given


class RolloutSpec(SessionBudget):
    """The options of one rollout. Its task is given separately."""

    harness: str = "mini-swe-agent"
    """The agent: NAME[@VERSION], acp:NAME (over the Agent Client Protocol), module:Class, or shell:COMMAND."""
    sandbox: Literal["auto", "docker", "bubblewrap", "process"] = "auto"
    """Kind of sandbox; auto takes the strongest that works here."""
    temperature: float = Field(1.0, ge=0)
    """Sampling temperature."""
    timeout: float = Field(600.0, gt=0)
    """Seconds that the agent may run, without the time for preparing, waiting and scoring."""
    max_tokens: int = Field(2048, ge=1, le=MAX_INTEGER)
    """Maximum number of tokens in one answer."""
    intercept: bool = False
    """Also answer the agent's calls to the hosts of OpenAI, Anthropic, Google and other providers. Use this for agents
    whose endpoint cannot be set. Agents that are known to need interception are intercepted without this option. Not
    available in process sandboxes."""
    max_user_turns: int = Field(20, ge=1, le=MAX_INTEGER)
    """In tasks that are dialogues: maximum number of user messages, the instruction included."""
    train_timed_out: bool = False
    """Also train on rollouts whose agent ran out of time."""
    train_over_budget: bool = False
    """Also train on rollouts that ended because a budget was spent."""
    signs: Literal["note", "zero", "exclude"] = "note"
    """Effect of signs of reward hacking: note (they are listed), zero (the reward is 0), exclude (the rollout is not
    trained on)."""

    @classmethod
    def read(cls, value: Json) -> Self:
        """Read stored options. Raises UsageError if this version cannot read them."""
        try:
            return cls.model_validate(value)
        except ValidationError as error:
            raise UsageError(f"The stored rollout options cannot be read: {first_problem(error)}.") from None

    def rollout(self) -> RolloutSpec:
        """Return only the fields of `RolloutSpec`. The fields that a subclass such as `JobSpec` adds are left out."""
        return RolloutSpec(**{name: getattr(self, name) for name in RolloutSpec.model_fields})

    def session_policy(self) -> Json:
        """Return the sampling parameters and the budget that the gateway enforces in the rollout's session.

        Sampling is from the model's complete distribution, so that the recorded log-probabilities are those of the
        policy that is trained."""
        return whole_distribution(self.temperature) | {"max_tokens": self.max_tokens} | self.as_policy()


class JobSpec(RolloutSpec):
    """The options of a job, which starts a group of `samples` rollouts for each of its tasks."""

    samples: int = Field(1, ge=1, le=4096)
    """Number of rollouts to start for each task. Together they are a group."""
    group_size: int | None = Field(None, ge=1, le=MAX_INTEGER)
    """Number of rollouts that complete a group (see group_policy). Default: all samples."""
    group_policy: str = "wait_for_all"
    """When a group is complete: wait_for_all (all rollouts have ended), first_n (group_size have ended with a reward),
    first_n_with_spread (as first_n, but not while all rewards are equal), no_spread_left (as first_n, or earlier if at
    most one rollout has a reward or can still get one) or token_budget=N (as first_n, or earlier if the group has
    sampled N tokens and two rollouts have a reward)."""
    overflow: Literal["cancel", "keep"] = "cancel"
    """How to treat rollouts that still run when their group is complete: cancel them, or keep them for a later group of
    the same task."""
    for_training: bool = False
    """Deliver finished groups to the trainer feed."""
    max_staleness: int | None = Field(None, ge=0, le=MAX_INTEGER)
    """With for_training: drop groups that are more than this many policy versions old."""
    priority: int = Field(0, ge=-MAX_INTEGER, le=MAX_INTEGER)
    """Jobs of higher priority run first."""
    label: str | None = None
    """A name to find the job by."""
    repeat_of: str | None = None
    """Id of a rollout to repeat, in place of a task. The job has the rollout's task, agent and options, except for the
    options that are given."""
    callback_url: str | None = None
    """Receives a signed POST for each finished group and for the end of the job."""

    def identity(self) -> Json:
        """Return the options that must be the same when an idempotency key is used again."""
        return self.model_dump(mode="json", exclude={"priority", "label", "callback_url"})
