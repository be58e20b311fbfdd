"""Writes model calls, one JSON document per line of standard input, into the SQLite store of rllm-model-gateway.

    python rllm_store.py FILE

Runs in the Python of that gateway's environment. Prints as JSON the time to read the session back, and the number of
calls read.
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
    started = time.perf_counter()
    traces = await store.get_session_traces(session_id)
    loaded = (time.perf_counter() - started) * 1000
    await store.close()
    print(json.dumps({"load_ms": round(loaded, 1), "calls": len(traces)}))


asyncio.run(main(sys.argv[1]))
