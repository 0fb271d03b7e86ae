"""What those find in their environment whom a daemon starts: agent, vault, etcd, a probe. One rule for all of them.

The one idea: what is said to the daemon alone goes no further: overrides of the configuration, some of which are passwords,
and how systemd is spoken to, which would take another's word for the daemon's.
"""

from collections.abc import Mapping
from typing import Final

OVERRIDES: Final = "ELASTICRL__"  # the configuration in the environment; the effective one has them all but the secrets
ITS_OWN: Final = (OVERRIDES, "NOTIFY_", "WATCHDOG_")


def inherited(environ: Mapping[str, str]) -> dict[str, str]:
    """The daemon's environment without what is its own.

    >>> inherited({"PATH": "/usr/bin", "ELASTICRL__STORE__PASSWORD": "geheim", "NOTIFY_SOCKET": "/run/systemd/notify"})
    {'PATH': '/usr/bin'}
    """
    return {name: value for name, value in environ.items() if not name.startswith(ITS_OWN)}
