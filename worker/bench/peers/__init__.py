"""Systems that the benchmark runs side by side, each in a process (and environment) of its own."""
