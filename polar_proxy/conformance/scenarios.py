"""What is played with a harness: scenarios as data. Which check is judged by which is in `judge`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from harness_adapters.base import Feature

FaultKind = Literal["429", "500", "slow", "drop"]


@dataclass(frozen=True, slots=True)
class RunCommands:
    """The model runs commands, all of one answer; each is preceded by a command that prints what only running tells."""

    commands: tuple[str, ...] = ("true",)


@dataclass(frozen=True, slots=True)
class StartSubagent:
    """The model starts a sub-agent."""


@dataclass(frozen=True, slots=True)
class WaitForSubagent:
    """The model waits for its sub-agent, where the harness has a tool for it; else it runs a command."""


@dataclass(frozen=True, slots=True)
class Finish:
    """The model says that it is done, in the harness's own way."""


Step = RunCommands | StartSubagent | WaitForSubagent | Finish


@dataclass(frozen=True, slots=True)
class Scenario:
    """One run of the program, or two where there is a second turn."""

    name: str
    title: str
    steps: tuple[Step, ...]
    second: tuple[Step, ...] = ()
    """Steps of a second user turn, in a second start of the program in the same home and workspace."""
    faults: tuple[FaultKind, ...] = ()
    """What goes wrong, once each, when the model is asked for a step; those that a run does not reach get another."""
    needs: Feature | None = None
    fills_context: bool = False
    """From the second step on the prompt is said to be as long as it takes, until a summary is asked for. How many
    commands there are is the harness's: `Profile.compaction_steps`."""
    endless: bool = False
    """The answer is so slow that the program is killed in the middle of it."""
    refuses: bool = False
    """Every request is answered with an error that trying again does not help against."""
    seconds: float = 120.0
    """Limit of one start of the program."""


BASIC = Scenario(
    "basic",
    "a command, two commands at once, the end; then a second user turn",
    steps=(RunCommands(), RunCommands(("true", "true")), Finish()),
    second=(RunCommands(), Finish()),
)
LONG = Scenario("long", "25 commands and the end", steps=(*(RunCommands() for _ in range(25)), Finish()), seconds=240)
SUBAGENT = Scenario(
    "subagent",
    "a sub-agent that runs a command",
    steps=(StartSubagent(), WaitForSubagent(), Finish()),
    needs="subagents",
)
COMPACTION = Scenario(
    "compaction",
    "the context fills up",
    steps=(RunCommands(), Finish()),
    fills_context=True,
    seconds=240,
)
FAULTS = Scenario(
    "faults",
    "429, 500, a slow first byte, a connection that is reset",
    steps=(RunCommands(), RunCommands(), RunCommands(), RunCommands(), RunCommands(), Finish()),
    faults=("429", "500", "slow", "drop"),
    seconds=180,
)
KILLED = Scenario("killed", "the program is killed in the middle of an answer", steps=(Finish(),), endless=True)
REFUSED = Scenario("refused", "the model refuses every request", steps=(Finish(),), refuses=True)

SCENARIOS = (BASIC, LONG, SUBAGENT, COMPACTION, FAULTS, KILLED, REFUSED)
