"""Parts of the benchmarks: proxies, engines, agents, load generator, processes to kill."""
