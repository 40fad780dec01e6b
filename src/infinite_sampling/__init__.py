"""Infinite Sampling: group rollouts whose size memory does not limit."""
