"""Columns of text, for terminals. It imports nothing: `status` has 300 ms, and a table library takes half of them."""

from collections.abc import Sequence


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns as wide as their widest cell; the last one runs free.

    >>> table(("node", "rank", "note"), [("n00", "0", "leader"), ("n01", "1", "")])
    ['node  rank  note', 'n00   0     leader', 'n01   1']
    """
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head) - 1)]
    return [
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[-1]]).rstrip()
        for row in (head, *rows)
    ]
