"""What is made of a job's secret: a key for each purpose, and the run's name in logs.

The one idea: each is a keyed hash of its purpose's word. So all nodes of a job come to the same without speaking of it, and
whoever knows one of them knows neither the secret nor any other.
"""

import hashlib


def derived(secret: bytes, purpose: str, size: int) -> str:
    """So many bytes for one purpose, in hexadecimal digits. The words stay: nodes of other versions know each other by them."""
    return hashlib.blake2b(purpose.encode(), key=secret, digest_size=size).hexdigest()


def vault_key(secret: bytes) -> str:
    """The key that this job's vaults know each other by."""
    return derived(secret, "vault", 32)


def engine_key(secret: bytes) -> str:
    """The key by which trainers and rollout engines know each other."""
    return derived(secret, "rollout", 32)


def probe_token(secret: bytes, generation: int) -> str:
    """What the datagrams and connections of that generation's probe bear."""
    return derived(secret, f"probe {generation}", 16)


def run_of(secret: bytes) -> str:
    """Which run of the job this is, for logs: what all of its nodes come to, and no other job of that name does."""
    return derived(secret, "run", 4)
