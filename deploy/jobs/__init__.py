"""Runs as Ray jobs, from a machine outside the cluster: submit, follow, fetch."""
