"""Ranks on this machine."""
