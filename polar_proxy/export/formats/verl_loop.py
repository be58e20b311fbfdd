"""The agent loop for verl's configuration (`actor_rollout_ref.rollout.agent.agent_loop_config_path`):

    - name: polar_recorded
      _target_: polar_proxy.export.formats.verl_loop.RecordedAgentLoop
      rows: rows.jsonl                # from `polar export --format tokens-jsonl`

Only verl imports this module: it needs `pip install verl`.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from verl.experimental.agent_loop.agent_loop import AgentLoopBase

from polar_proxy.export.formats.training_rows import require_same_temperature
from polar_proxy.export.formats.verl import RecordedGroups, outputs


@cache
def _groups(path: str) -> RecordedGroups:
    """Return the recorded groups of a file. Cached, because verl makes an agent loop for every sample: each worker
    reads the file only once."""
    return RecordedGroups.from_file(path)


class RecordedAgentLoop(AgentLoopBase):  # type: ignore[misc, unused-ignore]
    """Answers session i of a prompt with the i-th recorded rollout of the prompt's group. Calls no model.

    Raises RowError if the rollout was not sampled at the temperature `rollout.temperature` of verl's settings, because
    verl divides the logits by this temperature in training.
    """

    def __init__(self, *args: Any, rows: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._rows = rows

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> list[Any]:
        records = _groups(self._rows).session(kwargs["extra_info"], int(kwargs["session_id"]))
        for record in records:
            fields = record["extra_fields"]
            name = f"the row {fields['trace_id']}"
            require_same_temperature(name, fields["temperature"], sampling_params["temperature"])
        return outputs(records)
