"""Simulated engines, load generators and benchmarks."""
