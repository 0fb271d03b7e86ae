"""The vault: a node's memory of its workers' state, which outlives the workers.

The one idea: a shard is a file in tmpfs that is whole if and only if its last eight bytes to be written are there (`layout`).
Everything else follows: a worker writes its own memory into such a file (`client`), a small server beside it sends sealed
files to buddy nodes and serves them back (`server`), and which step a gang can resume from is a pure function of the lists of
files (`holdings`). Nothing here imports torch except `client`, which lives in the worker.
"""
