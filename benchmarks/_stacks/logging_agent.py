"""The agent of `benchmarks/chaos.py`: it logs the answers that it receives, independently of Polar.

It calls the model in one growing conversation (standard library only), each time with a unique word, alternating
between plain and streamed answers. After each *complete* answer it appends a line to its own file below `--log` and
waits until the line is on disk. It repeats calls whose answer broke off, as the providers' SDKs do.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import sys
import time
import urllib.error
import urllib.request
import uuid
from pathlib import Path
from typing import Any

RETRY_SECONDS = 120.0
"""Time limit for the attempts of one call."""


class IncompleteAnswerError(Exception):
    """The answer broke off."""


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--log", type=Path, required=True)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--rest", type=float, default=0.0, help="seconds after the last turn")
    arguments = parser.parse_args()
    own_id = uuid.uuid4().hex
    messages: list[dict[str, str]] = [{"role": "system", "content": "You repeat the given word."}]
    with (arguments.log / f"{own_id}.jsonl").open("a") as log:
        for turn in range(arguments.turns):
            nonce = f"nonce-{own_id[:12]}-{turn}"
            messages.append({"role": "user", "content": f"Turn {turn}. Your word is {nonce}."})
            answer, attempts = call_with_retries(messages, stream=bool(turn % 2))
            log.write(json.dumps({"nonce": nonce, "attempts": attempts, "at": time.time()} | answer) + "\n")
            log.flush()
            os.fsync(log.fileno())
            messages.append({"role": "assistant", "content": answer["text"]})
    time.sleep(arguments.rest)
    Path("done.txt").write_text("done\n")
    return 0


def call_with_retries(messages: list[dict[str, str]], *, stream: bool) -> tuple[dict[str, Any], int]:
    """Return a complete answer and the number of attempts that it took."""
    body = {"model": os.environ["POLAR_MODEL"], "messages": messages, "stream": stream, "max_tokens": 400}
    if stream:
        body["stream_options"] = {"include_usage": True}
    deadline = time.monotonic() + RETRY_SECONDS
    count = 0
    while True:
        count += 1
        try:
            return call_once(body, count - 1), count
        except urllib.error.HTTPError as error:
            if error.code < 500 and error.code not in (408, 409, 429):
                raise
            reason: Exception = error
        except (OSError, http.client.HTTPException, IncompleteAnswerError, ValueError) as error:
            reason = error
        print(f"attempt {count}: {reason!r}", flush=True)
        if time.monotonic() > deadline:
            raise SystemExit(3)
        time.sleep(min(0.25 * 2 ** (count - 1), 4.0))


def call_once(body: dict[str, Any], retries: int) -> dict[str, Any]:
    headers = {
        "authorization": "Bearer " + os.environ["OPENAI_API_KEY"],
        "content-type": "application/json",
        "x-stainless-retry-count": str(retries),
    }
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers), timeout=100) as answer:
        if not body["stream"]:
            document = json.load(answer)
            choice = document["choices"][0]
            return {
                "id": document["id"],
                "call_id": answer.headers["x-polar-call-id"],
                "text": choice["message"]["content"] or "",
                "tokens": document["usage"]["completion_tokens"],
            }
        return read_stream(answer)


def read_stream(answer: http.client.HTTPResponse) -> dict[str, Any]:
    text, tokens, ident, ended = "", None, "", False
    for line in answer:
        if not line.startswith(b"data: "):
            continue
        if line.strip() == b"data: [DONE]":
            if tokens is None or not ended:
                raise IncompleteAnswerError("the stream ended without a finish reason or usage")
            call_id = answer.headers["x-polar-call-id"]
            return {"id": ident, "call_id": call_id, "text": text, "tokens": tokens}
        chunk = json.loads(line[6:])
        if "error" in chunk:
            raise IncompleteAnswerError(str(chunk["error"]))
        ident = chunk["id"]
        for choice in chunk["choices"]:
            text += choice["delta"].get("content") or ""
            ended = ended or choice["finish_reason"] is not None
        if chunk.get("usage"):
            tokens = chunk["usage"]["completion_tokens"]
    raise IncompleteAnswerError("the stream broke off")


if __name__ == "__main__":
    sys.exit(main())
