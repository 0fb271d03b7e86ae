"""Whose a folder is: what lies in one that others can change says what they want.

The one idea: the processes of a node find each other, and what they are to run, by names in folders. Below `/tmp` or `/dev/shm`
anybody can have made such a folder first. So each is looked at before anything in it is believed.
"""

import os
import stat
from pathlib import Path


def strange(folder: Path) -> str:
    """Who else than this user and root could put other files there, in words; empty if nobody. The group of this process may:
    mostly every user has a group of his own.

    >>> strange(Path("/"))
    ''
    """
    try:
        link, status = folder.lstat(), folder.stat()
    except OSError as error:
        return f"{folder}: {error.strerror}"
    ours = (0, os.geteuid())
    if not stat.S_ISDIR(status.st_mode):
        return f"{folder} is no directory"
    if link.st_uid not in ours or status.st_uid not in ours:
        return f"{folder} belongs to user {status.st_uid if link.st_uid in ours else link.st_uid}"
    if status.st_mode & stat.S_ISVTX:
        return ""  # others make files there, and touch none but their own
    if status.st_mode & stat.S_IWOTH:
        return f"{folder} can be written to by everybody"
    if status.st_mode & stat.S_IWGRP and status.st_gid != os.getegid():
        return f"{folder} can be written to by group {status.st_gid}"
    return ""
