"""What `benchmarks/proxy.py` measures and measures with."""
