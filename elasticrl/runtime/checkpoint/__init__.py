"""Disk checkpoints: written from the vault by a process of their own, read by torch's stock tools, never trusted unverified.

The one idea: a checkpoint is a directory that appears under its name all at once, with a manifest that knows the checksum of
every other file. What was interrupted is under another name; what was changed no longer matches. So "the newest good one"
is a loop over directories, and nothing ever has to be repaired.

Read in this order: `manifest` (what is in one), `place` (where they are), `shelf` (list, verify, newest good, prune), `save`
and `load`, `parts` (what a training script's state is), `saver` (the background process as a worker sees it).
"""
