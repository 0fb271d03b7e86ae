"""Evidence from outside the core: log lines, flight recorders, the environment. The judgement is `core.judge.judge`."""
