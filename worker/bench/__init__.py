"""What `headrace bench` and `make bench` run."""
