"""Checks that Polar's recording of the expert equals the offline play of the same seeds, token for token.

Only two things may differ, because they depend on the machine: the line of `uname` in the prompt and the time that
`unittest` took. The offline play takes them from the recording; everything else must be equal.

    polar export --format tokens-jsonl --where 'reward>=1' --out demonstrations.jsonl
    python -m examples.tiny_policy.verify_export demonstrations.jsonl --tokenizer polar_proxy/assets/polar_tiny
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from examples.tiny_policy.data import Encoder
from examples.tiny_policy.dialogues import play_expert
from polar_proxy.tasks import get_source

_SYSTEM = re.compile(r"<system_information>\n(.*?)\n</system_information>")
_TIME = re.compile(r"Ran \d+ tests in 0\.(\d{3})s")


class RecordedTime:
    """Replaces the random source of the offline play by the time that the recorded test run took."""

    def __init__(self, text: str) -> None:
        found = _TIME.search(text)
        self._milliseconds = int(found[1]) if found else 0

    def choice(self, options: Any) -> int:
        """Return the recorded milliseconds; the options do not matter."""
        del options
        return self._milliseconds


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a tokens-jsonl export."""
    with path.open() as lines:
        for line in lines:
            yield json.loads(line)


def same(row: Mapping[str, Any], encoder: Encoder) -> bool:
    """Return whether the row's tokens and mask are those of the offline play of its task."""
    recorded = [*row["prompt_ids"], *row["response_ids"]]
    text = encoder.tokenizer.decode(recorded)
    system = _SYSTEM.search(text)
    if system is None:
        return False
    task = get_source("swe-task").task(int(row["task_id"].rpartition("-")[2]))
    offline = encoder.full(play_expert(task, system[1], RecordedTime(text)))  # type: ignore[arg-type]
    # The template ends with a newline after the last answer, which was not sampled.
    size = len(recorded)
    mask = [0] * len(row["prompt_ids"]) + list(row["loss_mask"])
    return (
        offline.ids[:size].tolist() == recorded
        and len(offline.ids) - size <= 1
        and [int(weight == 1.0) for weight in offline.weights[:size]] == mask
    )


def main() -> None:
    """Run the comparison. Exit code: 1 if a row differs or there are no rows."""
    parser = argparse.ArgumentParser(description="Compare recorded demonstrations with offline play.")
    parser.add_argument("export", type=Path)
    parser.add_argument("--tokenizer", type=Path, required=True)
    args = parser.parse_args()
    encoder = Encoder(AutoTokenizer.from_pretrained(args.tokenizer))
    results = {row["trace_id"]: same(row, encoder) for row in read_rows(args.export)}
    wrong = [trace for trace, equal in results.items() if not equal]
    print(json.dumps({"rows": len(results), "same": len(results) - len(wrong), "different": wrong}))
    raise SystemExit(1 if wrong or not results else 0)


if __name__ == "__main__":
    main()
