"""Random trees of conversations, placed by the session and by an oracle that compares whole conversations as lists.

Every step of a tree is one way in which a harness asks. It knows the edge and parent that a person would give its
request. The oracle finds them again, and the base, without hashes, indexes or rules: it reads all earlier calls.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from polar_proxy.sessions.lineage import Lineage
from polar_proxy.types import CallStatus, Json
from tests.sessions.conversations import SessionDriver, calls, result, says, system, user

EXAMPLES = 300
Canonical = list[tuple[str, str, list[tuple[str, str]]]]

# The oracle


@dataclass
class Recorded:
    """A call as the oracle knows it."""

    call_id: str
    messages: list[Json]
    answer: Json
    status: CallStatus


def canonical(messages: list[Json]) -> Canonical:
    """Return what messages mean: neighbouring assistant messages are one turn, in which no white space counts."""
    out: Canonical = []
    for message in messages:
        content = message["content"] or ""
        text = content if isinstance(content, str) else "".join(part["text"] for part in content)
        made = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", ())]
        made = [(name, json.dumps(json.loads(arguments), sort_keys=True)) for name, arguments in made]
        if message["role"] != "assistant":
            out.append((message["role"], text.strip(), made))
        elif out and out[-1][0] == "assistant":
            _, before, earlier = out.pop()
            out.append(("assistant", before + "".join(text.split()), earlier + made))
        else:
            out.append(("assistant", "".join(text.split()), made))
    return out


def ids_of(messages: list[Json]) -> list[str]:
    return [call["id"] for message in messages for call in message.get("tool_calls", ())]


def with_same_ids(found: list[Recorded], messages: list[Json], *, answer: bool) -> list[Recorded]:
    """Return the calls with the tool call ids of the request, or all of them if the ids exclude each."""
    ids = ids_of(messages)
    return [
        call for call in found if ids_of([*call.messages, call.answer] if answer else call.messages) == ids
    ] or found


def oracle_base(known: list[Recorded], messages: list[Json]) -> tuple[str, int] | None:
    for end in range(len(messages), 0, -1):
        if messages[end - 1]["role"] == "assistant":
            prefix = canonical(messages[:end])
            found = [c for c in known if c.status == "ok" and canonical([*c.messages, c.answer]) == prefix]
            if found:
                return with_same_ids(found, messages[:end], answer=True)[-1].call_id, end
    return None


def oracle_edge(known: list[Recorded], messages: list[Json]) -> tuple[str, str | None]:
    """Return edge and parent of a request that extends an earlier call's request or answer, or nothing."""
    whole = canonical(messages)
    same = [c for c in known if canonical(c.messages) == whole and ids_of(c.messages) == ids_of(messages)]
    if failed := [c for c in same if c.status != "ok"]:
        return "retries", failed[-1].call_id
    for end in range(len(messages), 0, -1):
        prefix = canonical(messages[:end])
        answered = [c for c in known if canonical([*c.messages, c.answer]) == prefix]
        if complete := [c for c in answered if c.status == "ok"]:
            return "continues", with_same_ids(complete, messages[:end], answer=True)[-1].call_id
        asked = [c for c in known if end < len(messages) and canonical(c.messages) == prefix]
        if asked:
            return "rewinds", with_same_ids(asked, messages[:end], answer=False)[-1].call_id
        if answered:
            return "rewinds", with_same_ids(answered, messages[:end], answer=True)[-1].call_id
    return "root", None


# The tree


@dataclass
class Line:
    """One agent's conversation, as its harness keeps it."""

    messages: list[Json]
    last: str | None = None
    """The call that gave the last answer."""
    asked: int = 0
    """Number of messages that this call was asked with; 0 if the harness joined its answer with the last of them."""
    points: list[tuple[str, int]] = field(default_factory=list)
    """(call, number of messages after its answer) of each answer in the history."""


class Tree:
    """A session, the lines in it, and every call so far. Each step asks at least once."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.session = SessionDriver()
        self.known: list[Recorded] = []
        self.lines: list[Line] = []
        self.bases = 0
        self._words = 0

    def word(self) -> str:
        self._words += 1
        return f"word{self._words}"

    def line(self) -> Line:
        """Return a random line with an answer; a new one if there is none."""
        if not self.lines or self.rng.random() < 0.1:
            self.lines.append(Line([system(f"You are {self.word()}."), user(f"Please {self.word()}.")]))
            self.turn_of(self.lines[-1])
        return self.rng.choice(self.lines)

    def answer(self) -> Json:
        text = self.rng.choice(["", "\n\n", "\n"]) + f"I say {self.word()}.\n\nThen\n  {self.word()}" + "\n"
        kind = self.rng.randrange(4)
        if kind == 0:
            return says(text)
        made = calls(command=f"run {self.word()}", wait=1)
        return made if kind == 1 else {**made, "content": text, "reasoning_content": self.word()}

    def returned(self, answer: Json) -> list[Json]:
        """Return an answer as a harness sends it back: with other white space and JSON, in one or two messages."""
        text, made = answer["content"] or "", answer.get("tool_calls", [])
        kind = self.rng.randrange(6)
        text = [text, text.strip(), f"\n{text}\n", text.rstrip(), text, text][kind]
        arguments = [json.dumps(json.loads(call["function"]["arguments"]), indent=kind) for call in made]
        made = [
            {**call, "function": {**call["function"], "arguments": value}}
            for call, value in zip(made, arguments, strict=True)
        ]
        one: Json = {"role": "assistant", "content": text or None, "tool_calls": made} if made else says(text)
        if kind == 4 and text.strip():
            pieces = [{"type": "text", "text": piece} for piece in text.strip().split("\n\n")]
            return [{**one, "content": pieces}]
        if kind == 5 and made and text:
            return [says(text.strip()), {**one, "content": None}]
        return [one]

    def news(self, line: Line) -> list[Json]:
        """Return the harness's next messages: the results of the last calls, or a user's text."""
        last = line.messages[-1]
        if last["role"] == "assistant" and last.get("tool_calls"):
            return [result(last, f"output {self.word()}\n")]
        return [user(f"Now {self.word()}.")]

    def ask(self, messages: list[Json], edge: str, parent: str | None, *, by_rule: bool = False) -> Lineage:
        """Ask, and compare the place with a person's (`edge`, `parent`) and with the oracle's.

        `by_rule`: the request extends nothing; a rule recognises it.
        """
        if self.rng.random() < 0.2:
            self.session.restart()
        found = self.session.ask(*messages)
        assert (found.edge, found.parent_call_id) == (edge, parent), found.rule
        if not by_rule:
            assert oracle_edge(self.known, messages) == (edge, parent)
        base = None if found.base is None else (found.base.call_id, found.base.end)
        assert base == oracle_base(self.known, messages)
        self.bases += base is not None
        return found

    def reply(self, found: Lineage, messages: list[Json], answer: Json, status: CallStatus = "ok") -> str:
        self.session.answer(found, answer, status=status)
        self.known.append(Recorded(found.call_id, list(messages), answer, status))
        return found.call_id

    def answered(self, line: Line, found: Lineage, answer: Json | None = None) -> None:
        """Answer a line's request, and add the answer to its history."""
        answer = answer or self.answer()
        asked = list(line.messages)
        line.last, line.asked = self.reply(found, asked, answer), len(asked)
        line.messages += self.returned(answer)
        line.points.append((line.last, len(line.messages)))

    def turn_of(self, line: Line) -> None:
        found = self.ask(line.messages, "continues" if line.last else "root", line.last)
        self.answered(line, found)

    # Steps

    def turn(self) -> None:
        line = self.line()
        line.messages += self.news(line)
        self.turn_of(line)

    def later_system_message(self) -> None:
        line = self.line()
        line.messages += [*self.news(line), system(f"From now on {self.word()}.")]
        self.turn_of(line)

    def message_by_the_harness(self) -> None:
        """An assistant message that was never sampled."""
        line = self.line()
        line.messages += [*self.news(line), says(f"Ok, {self.word()}."), user(f"Good, {self.word()}.")]
        self.turn_of(line)

    def stranger(self) -> None:
        """A conversation that begins with examples, which are no answers of this session."""
        shown = [user("Add two numbers."), says("Ok.")]
        self.lines.append(Line([system("Be brief."), *shown, user(f"Please {self.word()}.")]))
        self.turn_of(self.lines[-1])

    def prefill(self) -> None:
        line = self.line()
        line.messages += [*self.news(line), says(f"It is {self.word()} ")]
        found = self.ask(line.messages, "continues", line.last)
        self.answered(line, found, says(f" and {self.word()}."))
        if self.rng.random() < 0.5:  # the harness joins both parts
            end = line.messages.pop()["content"]
            text = end if isinstance(end, str) else "".join(part["text"] for part in end)
            line.messages[-1] = says(line.messages[-1]["content"] + text)
            line.points[-1], line.asked = (line.points[-1][0], len(line.messages)), 0

    def fork(self) -> None:
        """Another line begins at an earlier answer."""
        line = self.line()
        call_id, end = self.rng.choice(line.points)
        points = [point for point in line.points if point[1] <= end]
        made = Line(line.messages[:end], call_id, points=points)
        made.messages += [*self.news(made), user(f"Another way: {self.word()}.")]
        self.lines.append(made)
        self.turn_of(made)

    def line_to_rewind(self) -> Line:
        line = self.line()
        if not line.asked:
            line.messages += self.news(line)
            self.turn_of(line)
        return line

    def rewind(self) -> None:
        """The last answer is taken back."""
        line = self.line_to_rewind()
        del line.messages[line.asked :]
        line.messages.append(user(f"Rather {self.word()}."))
        self._rewound(line)

    def edit(self) -> None:
        """The harness replaces the last answer."""
        line = self.line_to_rewind()
        del line.messages[line.asked :]
        line.messages += [says(f"Edited {self.word()}."), user(f"And {self.word()}?")]
        self._rewound(line)

    def _rewound(self, line: Line) -> None:
        line.points.pop()
        found = self.ask(line.messages, "rewinds", line.last)
        self.answered(line, found)

    def retry(self) -> None:
        line = self.line()
        line.messages += self.news(line)
        found = self.ask(line.messages, "continues", line.last)
        for _ in range(self.rng.randrange(1, 3)):
            part = says(self.rng.choice(["", f"I beg {self.word()}"]))
            failed = self.reply(found, line.messages, part, "upstream_error")
            found = self.ask(line.messages, "retries", failed)
        self.answered(line, found)

    def cut_stream(self) -> None:
        """The request after a broken stream ends with what arrived, or with its beginning."""
        line = self.line()
        line.messages += self.news(line)
        found = self.ask(line.messages, "continues", line.last)
        words = [self.word() for _ in range(4)]
        failed = self.reply(found, line.messages, says("\n" + " ".join(words)), "client_gone")
        line.messages.append(says(" ".join(words[: self.rng.randrange(2, 5)])))
        found = self.ask(line.messages, "rewinds", failed)
        self.answered(line, found, says(f" and {self.word()}."))

    def kept_items(self) -> None:
        """Of a broken stream, the harness keeps the tool call, and answers it."""
        line = self.line()
        line.messages += self.news(line)
        found = self.ask(line.messages, "continues", line.last)
        part = calls(command=self.word())
        failed = self.reply(found, line.messages, {**part, "content": f"I look at {self.word()}."}, "upstream_error")
        line.messages += [part, result(part, self.word())]
        self.answered(line, self.ask(line.messages, "rewinds", failed))

    def compaction(self) -> None:
        line = self.line()
        line.messages += [*self.news(line), user("CONTEXT CHECKPOINT COMPACTION")]
        found = self.ask(line.messages, "continues", line.last)
        summary = f"The user wants that {self.word()} is done, and {self.word()} was found to be right."
        asked = self.reply(found, line.messages, says(summary))
        preamble = "Another language model started to solve this problem and produced a summary: "
        line.messages, line.points = [system("Go on."), user(preamble + summary)], []
        self.answered(line, self.ask(line.messages, "compacts", asked, by_rule=True))

    def subagent(self) -> None:
        """The answer starts an agent, which asks before its parent's next turn. Later turns interleave."""
        line = self.line()
        line.messages += self.news(line)
        found = self.ask(line.messages, "continues", line.last)
        prompt = f"Look for every use of {self.word()} in here."
        self.answered(line, found, calls("task", prompt=prompt))
        child = Line([system("You search."), user(prompt)])
        self.lines.append(child)
        self.answered(child, self.ask(child.messages, "subagent", line.last, by_rule=True))

    def parallel_runs(self) -> None:
        """A1 B1 A2 B2: two runs of one task say the same. Only the ids of their tool calls differ."""
        opening = [system(f"You are {self.word()}."), user("Run it.")]
        command = f"run {self.word()}"
        runs = [Line(list(opening)), Line(list(opening))]
        for run in runs:
            self.answered(run, self.ask(run.messages, "root", None), calls(command=command))
        for _ in range(2):
            for run in runs:
                run.messages.append(result(run.messages[-1], "the same output"))
                self.answered(run, self.ask(run.messages, "continues", run.last), calls(command=command))
        self.lines += runs

    def regenerated_opening(self) -> None:
        line = self.line()
        line.messages[0] = system(f"You are {self.word()} on another day.")
        line.points = []
        line.messages += self.news(line)
        self.answered(line, self.ask(line.messages, "continues", line.last, by_rule=True))

    def moved_turns(self) -> None:
        """As aider does: what the harness wrote itself stands elsewhere than before."""
        line = self.line()
        line.messages[1:1] = [user(f"These files: {self.word()}"), says("Ok, I will edit them.")]
        line.points = []
        line.messages += self.news(line)
        self.answered(line, self.ask(line.messages, "continues", line.last, by_rule=True))


STEPS: tuple[Callable[[Tree], None], ...] = (
    Tree.turn,
    Tree.later_system_message,
    Tree.message_by_the_harness,
    Tree.stranger,
    Tree.prefill,
    Tree.fork,
    Tree.rewind,
    Tree.edit,
    Tree.retry,
    Tree.cut_stream,
    Tree.kept_items,
    Tree.compaction,
    Tree.subagent,
    Tree.parallel_runs,
    Tree.regenerated_opening,
    Tree.moved_turns,
)


def test_random_trees_are_placed_as_by_the_oracle() -> None:
    covered: Counter[str] = Counter()

    @settings(max_examples=EXAMPLES, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(st.integers(0, 2**32), st.lists(st.sampled_from(STEPS), min_size=1, max_size=12))
    def check(seed: int, steps: list[Callable[[Tree], None]]) -> None:
        tree = Tree(seed)
        for step in steps:
            step(tree)
            covered[step.__name__] += 1
        covered["trees"] += 1
        covered["calls"] += len(tree.known)
        covered["bases"] += tree.bases

    check()
    print(dict(covered))
    assert {step.__name__ for step in STEPS} < covered.keys()
