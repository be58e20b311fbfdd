"""The agent under `benchmarks/chaos.py`, and its witness: it writes down what it was answered, without Polar's help.

It asks in turns (standard library only), each time with a word of its own that nobody else says, over one growing
conversation; whole and streamed answers take turns. After each *whole* answer it appends a line to its own file below
`--witness` and waits until the line is on the disk. Broken answers are asked for again, as the providers' SDKs do.
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

PATIENCE = 120.0
"""Seconds for which one turn is asked for again and again."""


class Broken(Exception):
    """The answer came to no end of its own."""


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--witness", type=Path, required=True)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--rest", type=float, default=0.0, help="seconds after the last turn")
    given = parser.parse_args()
    me = uuid.uuid4().hex
    messages: list[dict[str, str]] = [{"role": "system", "content": "You repeat the word that you are told."}]
    with (given.witness / f"{me}.jsonl").open("a") as book:
        for turn in range(given.turns):
            nonce = f"nonce-{me[:12]}-{turn}"
            messages.append({"role": "user", "content": f"Turn {turn}. Your word is {nonce}."})
            told, asked = answered(messages, stream=bool(turn % 2))
            book.write(json.dumps({"nonce": nonce, "asked": asked, "at": time.time()} | told) + "\n")
            book.flush()
            os.fsync(book.fileno())
            messages.append({"role": "assistant", "content": told["text"]})
    time.sleep(given.rest)
    Path("done.txt").write_text("done\n")
    return 0


def answered(messages: list[dict[str, str]], *, stream: bool) -> tuple[dict[str, Any], int]:
    """A whole answer, and how often it was asked for."""
    body = {"model": os.environ["POLAR_MODEL"], "messages": messages, "stream": stream, "max_tokens": 400}
    if stream:
        body["stream_options"] = {"include_usage": True}
    deadline = time.monotonic() + PATIENCE
    count = 0
    while True:
        count += 1
        try:
            return once(body, count - 1), count
        except urllib.error.HTTPError as error:
            if error.code < 500 and error.code not in (408, 409, 429):
                raise
            reason: Exception = error
        except (OSError, http.client.HTTPException, Broken, ValueError) as error:
            reason = error
        print(f"attempt {count}: {reason!r}", flush=True)
        if time.monotonic() > deadline:
            raise SystemExit(3)
        time.sleep(min(0.25 * 2 ** (count - 1), 4.0))


def once(body: dict[str, Any], retries: int) -> dict[str, Any]:
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
        return streamed(answer)


def streamed(answer: http.client.HTTPResponse) -> dict[str, Any]:
    text, tokens, ident, ended = "", None, "", False
    for line in answer:
        if not line.startswith(b"data: "):
            continue
        if line.strip() == b"data: [DONE]":
            if tokens is None or not ended:
                raise Broken("the end without a finish reason or a usage")
            call_id = answer.headers["x-polar-call-id"]
            return {"id": ident, "call_id": call_id, "text": text, "tokens": tokens}
        chunk = json.loads(line[6:])
        if "error" in chunk:
            raise Broken(str(chunk["error"]))
        ident = chunk["id"]
        for choice in chunk["choices"]:
            text += choice["delta"].get("content") or ""
            ended = ended or choice["finish_reason"] is not None
        if chunk.get("usage"):
            tokens = chunk["usage"]["completion_tokens"]
    raise Broken("the stream was cut")


if __name__ == "__main__":
    sys.exit(main())
