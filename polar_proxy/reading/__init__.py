"""Read a database from Python and by SQL: `polar_proxy.read(db)`, and what `polar sql` runs.

A `RecordFrame` has the rows of a view as columns, for Arrow, pandas and Polars. Reading changes nothing.
"""

from polar_proxy.reading.frame import RecordFrame
from polar_proxy.reading.recording import Recording

__all__ = ["RecordFrame", "Recording"]
