#!/usr/bin/env python3
"""A small agent of the Agent Client Protocol (standard library only). The user's text says what it does.

If its environment has OPENAI_BASE_URL, it asks the model there for its answers. Its conversation is kept in a file, so
that a new process can continue it.
"""

from __future__ import annotations

import json
import os
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

STATE = Path(os.environ["HOME"]) / "conversation.json"
cancelled = False


def send(message: dict[str, Any]) -> None:
    print(json.dumps({"jsonrpc": "2.0", **message}), flush=True)


def read() -> dict[str, Any]:
    global cancelled
    line = sys.stdin.readline()
    if not line:
        sys.exit(0)
    message: dict[str, Any] = json.loads(line)
    cancelled = cancelled or message.get("method") == "session/cancel"
    return message


def ask_client(method: str, **params: Any) -> dict[str, Any]:
    """Send a request to the client and return its whole answer."""
    send({"id": f"agent-{method}", "method": method, "params": {"sessionId": "s1", **params}})
    while True:
        message = read()
        if "method" not in message:
            return message


def say(text: str) -> None:
    content = {"type": "text", "text": text}
    update = {"sessionUpdate": "agent_message_chunk", "content": content}
    send({"method": "session/update", "params": {"sessionId": "s1", "update": update}})


def ask_model(messages: list[dict[str, str]]) -> str:
    body = json.dumps({"model": os.environ["OPENAI_MODEL"], "messages": messages}).encode()
    headers = {"authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "content-type": "application/json"}
    request = urllib.request.Request(f"{os.environ['OPENAI_BASE_URL']}/chat/completions", body, headers)
    with urllib.request.urlopen(request, timeout=60) as reply:
        return str(json.load(reply)["choices"][0]["message"]["content"])


def play(text: str, messages: list[dict[str, str]]) -> str:
    """Do what the user's text says and return the stop reason."""
    messages.append({"role": "user", "content": text})
    if "OPENAI_BASE_URL" in os.environ:
        answer = ask_model(messages)
        (Path.cwd() / "notes.txt").open("a").write(f"{text} -> {answer}\n")
    elif text == "crash":
        sys.stderr.write("Traceback: it broke\n")
        sys.exit(3)
    elif text == "malformed":
        print("this is { not json", flush=True)
        print("[1, 2]", flush=True)
        answer = "after bad lines"
    elif text == "permission":
        options = [{"optionId": "no", "kind": "reject_once"}, {"optionId": "yes", "kind": "allow_once"}]
        answer = json.dumps(ask_client("session/request_permission", toolCall={}, options=options)["result"])
    elif text == "files":
        path = str(Path.cwd() / "deep" / "f.txt")
        ask_client("fs/write_text_file", path=path, content="one\ntwo\nthree\n")
        found = ask_client("fs/read_text_file", path=path, line=2, limit=1)
        answer = json.dumps([found["result"]["content"], ask_client("fs/read_text_file", path="/nothing")["error"]])
    elif text == "terminal":
        env = [{"name": "WORD", "value": "hi"}]
        made = ask_client("terminal/create", command="sh", args=["-c", "echo $WORD; exit 5"], env=env)
        name = made["result"]["terminalId"]
        status = ask_client("terminal/wait_for_exit", terminalId=name)["result"]
        output = ask_client("terminal/output", terminalId=name)["result"]
        ask_client("terminal/release", terminalId=name)
        answer = json.dumps([status, output["output"]])
    elif text == "unknown":
        answer = json.dumps(ask_client("made/up")["error"])
    elif text == "slow":
        say("waiting\n")
        while not cancelled:
            read()
        return "cancelled"
    elif text == "stuck":
        say("waiting\n")
        time.sleep(600)
    else:
        answer = f"you said: {text} ({len(messages)})"
    messages.append({"role": "assistant", "content": answer})
    say(answer)
    return "refusal" if text == "refuse" else "max_turn_requests" if text == "limit" else "end_turn"


def main() -> None:
    global cancelled
    messages: list[dict[str, str]] = []
    while True:
        message = read()
        method, number, params = message.get("method"), message.get("id"), message.get("params") or {}
        if method == "initialize":
            version = int(os.environ.get("FAKE_VERSION", "1"))
            capabilities = {"loadSession": "FAKE_FORGETS" not in os.environ}
            send({"id": number, "result": {"protocolVersion": version, "agentCapabilities": capabilities}})
        elif method == "session/new" and "FAKE_LOCKED" in os.environ:
            send({"id": number, "error": {"code": -32000, "message": "Authentication required"}})
        elif method == "session/new":
            assert params["cwd"] == os.getcwd()
            say(f"servers: {json.dumps(params['mcpServers'])}\n")
            send({"id": number, "result": {"sessionId": "s1"}})
        elif method == "session/load":
            messages = json.loads(STATE.read_text())
            for one in messages:
                say(f"replayed {one['content']}")
            send({"id": number, "result": None})
        elif method == "session/prompt":
            cancelled = False
            reason = play(params["prompt"][0]["text"], messages)
            STATE.write_text(json.dumps(messages))
            send({"id": number, "result": {"stopReason": reason}})


if __name__ == "__main__":
    main()
