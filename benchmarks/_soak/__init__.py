"""Parts of `benchmarks/soak.py`: the engine that fails now and then, its clients, and the observer of the server."""
