"""What the logs of spare processes say of what they have loaded ahead."""

from pathlib import Path


def loaded_ahead(logs: Path, node: str, said: str = "loaded ahead; this process waits") -> bool:
    """Has the node's newest spare process said that?"""
    mine = [log for log in logs.rglob("process_*.log") if f"/{node}/warm/" in str(log)]
    return bool(mine) and said in max(mine, key=lambda log: int(log.stem.rpartition("_")[2])).read_text()
