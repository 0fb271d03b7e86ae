"""Passwords: from the environment, or from a file that its owner and its group alone can read."""

from pathlib import Path

from pydantic import SecretStr

from elasticrl.config.finding import ConfigError, Finding, Origin


def reveal(secret: SecretStr | None, file: str | None) -> str | None:
    """The password itself: the one that was given, else the file's first line; None if there is neither.

    Call it where the password is used, and hand it on to nothing that is printed.
    """
    if secret is not None:
        return secret.get_secret_value()
    if file is None:
        return None
    path = Path(file)
    try:
        mode = path.stat().st_mode
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else "it is not UTF-8 text"
        raise _refused(
            file, "must be readable", reason.lower(), "Create it for the daemon's user, mode 0400."
        ) from error
    if mode & 0o007:
        raise _refused(file, "must be closed to others", f"its mode is {mode & 0o777:04o}", f"Run chmod 0400 {file}.")
    if not lines or not lines[0]:
        raise _refused(file, "must hold a password", "its first line is empty", "Write the password as its first line.")
    return lines[0]


def _refused(file: str, rule: str, values: str, remedy: str) -> ConfigError:
    where = Origin(source="file", name=file)
    return ConfigError((Finding(where=where, key="", rule=rule, values=values, remedy=remedy),))
