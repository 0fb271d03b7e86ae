"""What the logs of spare processes say of what they have loaded ahead."""

from pathlib import Path


def loaded_ahead(logs: Path, node: str, said: str = "loaded ahead; this process waits") -> bool:
    """Has a spare process of the node said that?"""
    mine = [log for log in (logs).rglob("*.log") if f"/{node}/" in str(log) and "rank_" not in log.name]
    return any(said in log.read_text() for log in mine)
