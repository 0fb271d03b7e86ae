"""The configuration: YAML in, one frozen tree out, and every problem reported at once with its remedy.

Read `tree` for the sections, `cluster` and `training` for their fields, `relations` for the rules between them, `load` for
how file, environment and command line become one. `elasticrl.contract.settings` is what the core gets of it (`to_core`).
"""

from elasticrl.config.changes import Change, changes, clash, taken_up
from elasticrl.config.core import to_core
from elasticrl.config.finding import ConfigError, Finding, Origin
from elasticrl.config.load import Loaded, load, read
from elasticrl.config.secrets import reveal
from elasticrl.config.tree import Tree, digest, dumps, loads, run_dir

__all__ = [
    "Change",
    "ConfigError",
    "Finding",
    "Loaded",
    "Origin",
    "Tree",
    "changes",
    "clash",
    "digest",
    "dumps",
    "load",
    "loads",
    "read",
    "reveal",
    "run_dir",
    "taken_up",
    "to_core",
]
