"""What the tests of the configuration know of how the core's settings are called."""

#: The fields of `contract.settings` that come from a key of another name, or from all keys of a section.
RENAMED = {
    "job": "job.name",
    "level": "job.level",
    "lanes": "lanes.count",
    "team": "model.tp",
    "steps": "job.steps",
    "copies": "vault.copies",
    "retry_s": "store.retry",
    "exact": "lanes.exact",
    "timeouts.phase_s": "timeouts.phase",
    "fallback": "comm.fallback",
    "fallback_limit": "comm.fallback_limit",
    "policy": "policy",
}
