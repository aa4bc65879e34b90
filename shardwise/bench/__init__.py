"""Benchmarks against peers: contenders, and an emulated cluster with slow links on one machine."""
