"""Runs in the peer's own Python: model calls, a JSON document a line on standard input, into its SQLite store.

    python rllm_store.py FILE

Prints the time that it takes to read the session back, and how many calls came back, as JSON.
"""

import asyncio
import json
import sys
import time

from rllm_model_gateway.models import TraceRecord
from rllm_model_gateway.store.sqlite_store import SqliteTraceStore


async def main(path):
    store = SqliteTraceStore(path)
    session_id = ""
    for line in sys.stdin:
        record = TraceRecord(**json.loads(line))
        session_id = record.session_id
        await store.store_trace(record.trace_id, session_id, record.model_dump())
    begun = time.perf_counter()
    found = await store.get_session_traces(session_id)
    loaded = (time.perf_counter() - begun) * 1000
    await store.close()
    print(json.dumps({"load_ms": round(loaded, 1), "calls": len(found)}))


asyncio.run(main(sys.argv[1]))
