"""The folders of a job on this machine's disks: closed to others before anything is written there, and believed only if ours.

The one idea: where somebody else could put files, a record would say what they want (whose etcd is ours, which process to end),
and a link would lead our lines into any file of ours.
"""

from contextlib import suppress
from pathlib import Path

from elasticrl.base.owned import foreign, made_closed
from elasticrl.config import Tree
from elasticrl.diagnose.job_store import ETCD


def not_ours(tree: Tree, node: str) -> str:
    """Why this node may not use its folders for state and logs, with what to do; empty if it may. They are made if need be."""
    for key, base in (("node.state_dir", tree.node.state_dir), ("telemetry.log_dir", tree.telemetry.log_dir)):
        job = Path(base).absolute() / tree.job.name
        with suppress(OSError):  # whoever writes there says why it cannot be
            made_closed(job)
        for name in (node, ETCD):
            if why := foreign(job / name):
                return (
                    f"{why}: whoever can change what is in it could have this job believe what is not so. Remove it if nobody "
                    f"needs it, or set {key} to a folder of your own"
                )
    return ""
