"""Read a database from Python (`recording.py`, by `polar_proxy.read(db)`) and by SQL (`sql.py`, by `polar sql`).

A `RecordFrame` has the rows of a view as columns, for Arrow, pandas and Polars. Reading changes nothing.
"""
