"""The operator's key: ed25519, in PEM files that other programs read too.

The one idea: a key says who vouches for a run, and nothing else. So it is made apart from any job, only its owner can read it,
and whoever checks a certificate names the public half that is expected.
"""

from __future__ import annotations

import os
import stat
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from elasticrl.base.owned import write_private
from elasticrl.base.regular import open_regular

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

LARGEST: Final = 1 << 14  # bytes of a key's file
PUBLIC: Final = ".pub"
HEX: Final = 64  # digits of a public key


class KeyProblem(Exception):
    """A key that cannot be used, or is not there; the sentence says what to do."""


def make(path: Path) -> str:
    """A new key at `path`, readable by its owner alone, and its public half beside it; the public key is returned."""
    ed25519, serial = _modules()
    for there in (path, public_of(path)):
        if there.exists() or there.is_symlink():
            raise KeyProblem(f"{there} exists already: a key is never overwritten. Name another file.")
    key = ed25519.Ed25519PrivateKey.generate()
    private = key.private_bytes(serial.Encoding.PEM, serial.PrivateFormat.PKCS8, serial.NoEncryption())
    public = key.public_key().public_bytes(serial.Encoding.PEM, serial.PublicFormat.SubjectPublicKeyInfo)
    try:
        write_private(path, private.decode(), sync=True)
        public_of(path).write_text(public.decode(), encoding="ascii")
    except OSError as error:
        raise KeyProblem(f"the key cannot be written to {path}: {error.strerror}") from error
    return _hex(key)


def public_of(path: Path) -> Path:
    """Where the public half of a key lies."""
    return path.with_name(path.name + PUBLIC)


def load(path: Path) -> Ed25519PrivateKey:
    """A key to sign with. One that others can read is refused: they could sign too."""
    ed25519, serial = _modules()
    try:
        with open_regular(path) as file:
            mode, text = os.fstat(file.fileno()).st_mode, file.read(LARGEST)
    except OSError as error:
        raise KeyProblem(
            f"the key {path} cannot be read ({error.strerror}): make one with `elasticrl certify --new-key {path}`"
        ) from error
    if stat.S_IMODE(mode) & 0o077:
        raise KeyProblem(f"others can read the key {path} (mode {stat.S_IMODE(mode):04o}): chmod 600 {path}")
    try:
        found: Any = serial.load_pem_private_key(text, password=None)
    except (ValueError, TypeError) as error:
        raise KeyProblem(f"{path} is no private key without a password: {error}") from error
    if not isinstance(found, ed25519.Ed25519PrivateKey):
        raise KeyProblem(f"{path} is no ed25519 key")
    mine: Ed25519PrivateKey = found
    return mine


def public(named: str) -> str:
    """A public key that somebody names: 64 digits, or a file with it."""
    if len(named) == HEX and set(named.lower()) <= set("0123456789abcdef"):
        return named.lower()
    ed25519, serial = _modules()
    try:
        with open_regular(Path(named)) as file:
            text = file.read(LARGEST)
        found = serial.load_pem_public_key(text)
    except OSError as error:
        raise KeyProblem(f"the public key {named} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise KeyProblem(f"{named} is no public key; the file that ends in {PUBLIC} is") from error
    if not isinstance(found, ed25519.Ed25519PublicKey):
        raise KeyProblem(f"{named} is no ed25519 key")
    return str(found.public_bytes(serial.Encoding.Raw, serial.PublicFormat.Raw).hex())


def sign(key: Ed25519PrivateKey, text: bytes) -> tuple[str, str]:
    """The public key, and the signature."""
    return _hex(key), key.sign(text).hex()


def fits(key: str, signature: str, text: bytes) -> bool:
    """Whether this key has signed this text."""
    from cryptography.exceptions import InvalidSignature

    ed25519, _ = _modules()
    try:
        ed25519.Ed25519PublicKey.from_public_bytes(bytes.fromhex(key)).verify(bytes.fromhex(signature), text)
    except (ValueError, InvalidSignature):
        return False
    return True


def short(key: str) -> str:
    """A public key's fingerprint, for people to compare."""
    return sha256(bytes.fromhex(key)).hexdigest()[:16]


def _hex(key: Ed25519PrivateKey) -> str:
    _, serial = _modules()
    return key.public_key().public_bytes(serial.Encoding.Raw, serial.PublicFormat.Raw).hex()


def _modules() -> tuple[Any, Any]:
    try:
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ModuleNotFoundError as error:
        raise KeyProblem("signatures need the package cryptography: pip install 'elasticrl[certify]'") from error
    return ed25519, serialization
