"""Placeholder docstring; see docs/ARCHITECTURE.md."""
