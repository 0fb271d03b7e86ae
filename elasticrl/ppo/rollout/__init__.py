"""Rollout engines: what turns prompts into samples. engine.py is the protocol, inline.py the exact one in plain torch."""
