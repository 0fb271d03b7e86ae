"""What a secret looks like, and a text without any: for whatever is shown, or sent to somebody.

The one idea: most secrets say what they are, by the name before them or by their own first letters. Where it is not
sure it removes; but lines that every run prints (tokens that are counted, paths, digests) stay as they are.
"""

# ruff: noqa: E501 -- what one party gives out is one line

import re
from collections.abc import Mapping
from typing import Any, Final

HIDDEN: Final = "[removed]"
WORDS: Final = (
    r"(?:pass(?:word|wd|phrase)|(?<=_)pass\b|(?<=_)pwd|secret|token(?!i|s(?![a-z]))|api[_-]?key|credential|authorization|"
    r"(?:access|account|private|auth|signing|encryption|master|shared[_-]?access|service|license)[_-]?key|"
    r"(?:connection|conn)[_-]?str|shared[_-]?access[_-]?signature|identity[_-]?token|webhook[_-]?url)"
)
NAMED: Final = re.compile(WORDS, re.IGNORECASE)
#: Secrets that are known by their first letters, each by who gives them out.
KNOWN: Final = (
    r"(?:AKIA|ASIA|ABIA|ACCA|AGPA|AIDA|AROA|ANPA)[A-Z0-9]{16}",  # AWS
    r"(?:IQoJb3JpZ2lu|FwoGZXIvYXdz)[A-Za-z0-9+/=]{20,}+",  # AWS sessions
    r"AIza[\w-]{35}|ya29\.[\w.-]{20,}+|GOCSPX-[\w-]{20,}+|1//0[\w-]{30,}+",  # Google
    r"[A-Za-z0-9_~.-]{3}[0-9]Q~[A-Za-z0-9_~.-]{31,40}+",  # Azure
    r"(?:hf|api_org)_[A-Za-z0-9]{20,}+",  # Hugging Face
    r"sk-[A-Za-z0-9_-]{20,}+",  # OpenAI, Anthropic, OpenRouter, DeepSeek
    r"gh[pousr]_[A-Za-z0-9]{20,}+|github_pat_\w{20,}+",  # GitHub
    r"gl(?:pat|dt|rt|cbt|ptt|ft|imt|agent|soat|oas)-[\w.-]{18,}+",  # GitLab
    r"xox[abeoprs]-[\w-]{10,}+|xapp-\d-[\w-]{10,}+|(?<=hooks\.slack\.com/services/)[\w/]{20,}+",  # Slack
    r"(?<=/api/webhooks/)\d{15,20}/[\w-]{20,}+|[MNO][\w-]{23,27}\.[\w-]{6}\.[\w-]{27,40}",  # Discord
    r"[0-9]{8,10}:AA[\w-]{33}",  # Telegram
    r"eyJ[\w-]{8,}+\.[\w-]{8,}+(?:\.[\w-]*+){0,3}",  # JWT, JWE: Kubernetes, OIDC
    r"wandb_v\d_[\w-]{20,}+|local-[0-9a-f]{40}",  # Weights & Biases
    r"nvapi-[\w-]{20,}+|gsk_[A-Za-z0-9]{20,}+|pplx-[A-Za-z0-9]{20,}+|xai-[A-Za-z0-9]{20,}+|r8_[A-Za-z0-9]{20,}+|lsv2_\w{20,}+",
    r"dapi[0-9a-f]{32}|dop_v1_[0-9a-f]{32,}+|tskey-[\w-]{16,}+|fw_[A-Za-z0-9]{20,}+|sbp_[0-9a-f]{32,}+|dckr_pat_[\w-]{20,}+",
    r"(?:sk|rk|pk)_(?:live|test)_[A-Za-z0-9]{16,}+|whsec_[A-Za-z0-9+/=]{16,}+|shp(?:at|ca|pa|ss)_[0-9a-fA-F]{32}",  # shops
    r"SK[0-9a-f]{32}|SG\.[\w-]{16,}+\.[\w-]{16,}+|key-[0-9a-f]{32}",  # Twilio, SendGrid, Mailgun
    r"npm_[A-Za-z0-9]{30,}+|pypi-[\w-]{30,}+|rubygems_[0-9a-f]{32,}+|cio[A-Za-z0-9]{32}",  # registries
    r"hv[sbr]\.[\w-]{20,}+|AGE-SECRET-KEY-1[A-Z0-9]{40,}+|dp\.(?:pt|st|ct|sa)\.[\w.]{20,}+|ops_eyJ[\w-]{20,}+",  # keepers of them
    r"gl(?:sa|c)_[\w=-]{20,}+|NRAK-[A-Z0-9]{20,}+|sntry[su]_[\w=-]{20,}+|PMAK-[0-9a-f-]{40,}+|lin_api_\w{20,}+",
    r"ATATT3[\w=-]{20,}+|ntn_[A-Za-z0-9]{20,}+|pscale_(?:tkn|pw)_[\w.-]{20,}+",
)
#: What a secret looks like: what is left of it, and what is not. None goes back from where it looks: a log's line may be one word
#: of a megabyte.
LOOKS: Final = (
    re.compile(r"(authorization\\*[\"']?\s*[=:]\s*\\*[\"']?)([^\s\"'\\]+ [^\"'\\\r\n]{3,})", re.IGNORECASE),  # of any scheme
    re.compile(  # by the name before it: in an assignment, a configuration, JSON, a header
        rf"((?<![\w.-])(?=[\w.-]*?{WORDS})[\w.-]++\\*[\"']?\]?\s*[=:]\s*\\*[\"']?(?:Bearer |Basic )?)([^\s\"',;}}&\\<\[({{]{{3,}})",
        re.IGNORECASE,
    ),
    re.compile(r"(\b(?:set-)?cookie\\*[\"']?\s*:\s*\\*[\"']?)([^\s=;\"'\\]{1,100}+=[^\"'\\\r\n]{3,})", re.IGNORECASE),
    re.compile(r"(\bBearer\s++)([\w.~+/=-]{8,}+)", re.IGNORECASE),
    re.compile(r"(\bBasic\s++)((?=[A-Za-z]*+[0-9+/=])[A-Za-z0-9+/=]{8,}+)(?![\w.-])"),
    re.compile(  # of a program's words: "--hf-token", "..."
        rf"((?<![\w-])--[\w-]{{0,40}}?{WORDS}[\w-]{{0,40}}+(?:\\*[\"'])?,?\s+\\*[\"']?)(?!--)([^\s\"',;\\]{{3,}})", re.IGNORECASE
    ),
    re.compile(r"((?:\s-u|--user|--proxy-user)[\s=]\\*[\"']?[\w.@-]++:)([^\s\"'\\]{3,})"),  # curl's
    re.compile(r"(\blogin\s++\S++\s++password\s++)(\S++)"),  # netrc
    re.compile(r"((?<![\w-])wandb\s++login\s++(?:--\S++\s++)*+)([\w-]{20,}+)"),
    re.compile(r"([\"'](?:auth|key)\\*[\"']\s*:\s*\\*[\"'])([A-Za-z0-9+/=_-]{16,}+)(?=\\*[\"'])"),  # Docker's, Kaggle's
    re.compile(r"(\bpwd\s*=\s*)([^\s;\"'/][^\s;\"']{2,})", re.IGNORECASE),  # of a database's address; PWD is a folder
    re.compile(r"([?&](?:sig|signature|X-(?:Amz|Goog)-(?:Signature|Credential|Security-Token))=)([^\s&\"'\\]{8,})", re.IGNORECASE),
    re.compile(r"(://[^\s/:@]*+:)([^\s/]+)(?=@)"),  # a password in an address, which may have an @ itself
    re.compile(r"(://)([\w~+=-]{20,}+)(?=@)"),  # or nothing but a password
    re.compile(rf"()(?<![A-Za-z0-9])({'|'.join(KNOWN)})(?![A-Za-z0-9])"),
    re.compile(r"(-----BEGIN [A-Z0-9 ]*PRIVATE KEY(?: BLOCK)?-----)(.*?)(?=-----END|\Z)", re.DOTALL),
)  # fmt: skip
PLAIN: Final = re.compile(  # no secret
    r"^(?:null|none|true|false|yes|no|[+-]?\d{1,6}|[+-]?\d*\.\d+(?:e[+-]?\d+)?|\*+|\[removed\]|set|unset|str|int|float|bool)$",
    re.IGNORECASE,
)


def veiled(text: str) -> tuple[str, int]:
    """A text without what looks like a secret, and how many it had.

    >>> veiled("HF_TOKEN=hf_abcdefghijklmnopqrstuvwxyz tokens: 4096")
    ('HF_TOKEN=[removed] tokens: 4096', 1)
    """
    removed = 0

    def hide(match: re.Match[str]) -> str:
        nonlocal removed
        if PLAIN.match(match[2]) or match[2].startswith(HIDDEN[:-1]):
            return match[0]
        removed += 1
        return match[1] + HIDDEN

    for look in LOOKS:
        text = look.sub(hide, text)
    return text, removed


def shown_of(value: Any) -> Any:
    """A setting as it is shown: others look over the shoulder, and outputs are pasted.

    >>> shown_of({"HF_TOKEN": "abc", "NCCL_DEBUG": "WARN"}), shown_of(["--token", "abc", "--steps", "3"])
    ({'HF_TOKEN': '[removed]', 'NCCL_DEBUG': 'WARN'}, ['--token', '[removed]', '--steps', '3'])
    """
    if isinstance(value, Mapping):
        return {name: HIDDEN if NAMED.search(str(name)) else shown_of(each) for name, each in value.items()}
    if isinstance(value, list | tuple):  # an option and its value are two words
        pairs = zip((None, *value), value, strict=False)
        return [
            HIDDEN if _asks(before) and not str(each).startswith("--") else shown_of(each) for before, each in pairs
        ]
    return veiled(value)[0] if isinstance(value, str) else value


def _asks(word: object) -> bool:
    return isinstance(word, str) and word.startswith("--") and "=" not in word and NAMED.search(word) is not None
