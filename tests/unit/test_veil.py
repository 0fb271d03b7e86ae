"""No secret of a usual form passes, and ordinary lines of a run stay as they are."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elasticrl.base.redact import HIDDEN, veiled

A = "aB3dE5gH7jK9mN1pQ2rS4tU6vW8xY0zC5vB7nM9q"  # 40 letters of nobody's
X = "0123456789abcdef" * 4
SECRETS = {  # what a log may say, with the secret in <>
    "aws id": "using <AKIAIOSFODNN7EXAMPLE> now",
    "aws session id": "<ASIAIOSFODNN7EXAMPLE>",
    "aws key": f"aws_secret_access_key = <{A}>",
    "aws env": f"AWS_SECRET_ACCESS_KEY=<{A}>",
    "aws session": f"AWS_SESSION_TOKEN=<IQoJb3JpZ2luX2Vj{A}>",
    "aws bare session": f"found <FwoGZXIvYXdz{A}=>",
    "aws presigned": f"GET https://b.s3.amazonaws.com/k?X-Amz-Date=1&X-Amz-Signature=<{X}>&x=1",
    "gcp api": "key <AIza" + A[:35] + ">",
    "gcp oauth": f"<ya29.{A}>",
    "gcp client": f"<GOCSPX-{A[:28]}>",
    "gcp service account": f'"private_key_id": "<{X[:40]}>"',
    "azure storage": f"DefaultEndpointsProtocol=https;AccountName=a;AccountKey=<{A}{A}==>;EndpointSuffix=core",
    "azure sas": f"https://a.blob.core.windows.net/c?sv=2022&sig=<{A}%3D>",
    "azure shared": f"Endpoint=sb://x;SharedAccessKeyName=root;SharedAccessKey=<{A}=>",
    "azure client": "<abc8Q~" + A[:34] + ">",
    "hugging face": f"login <hf_{A[:34]}>",
    "hugging face env": f"export HF_TOKEN=<{A[:20]}>",
    "openai": f"<sk-{A}>",
    "openai project": f"<sk-proj-{A}-{A}>",
    "anthropic": f"<sk-ant-api03-{A}-{A}>",
    "github": f"<ghp_{A[:36]}>",
    "github app": f"<ghs_{A[:36]}>",
    "github fine": f"<github_pat_{A[:22]}_{A}>",
    "gitlab": f"<glpat-{A[:20]}>",
    "gitlab job": f"CI_JOB_TOKEN=<{A[:20]}>",
    "slack bot": f"<xoxb-123456789012-{A[:24]}>",
    "slack app": f"<xapp-1-A0123-{A}>",
    "slack hook": f"https://hooks.slack.com/services/<T00000000/B00000000/{A[:24]}>",
    "discord hook": f"https://discord.com/api/webhooks/<123456789012345678/{A}>",
    "telegram": f"bot<123456789:AA{A[:33]}>".replace("bot", "bot "),
    "jwt": f"jwt <eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NTY3ODkwIn0.{A}>",
    "unsigned jwt": "<eyJhbGciOiJub25lIn0.eyJzdWIiOiIxMjM0NTY3ODkwIn0.>",
    "rsa": f"-----BEGIN RSA PRIVATE KEY-----<\n{A}\n{A}\n>-----END RSA PRIVATE KEY-----",
    "openssh": f"-----BEGIN OPENSSH PRIVATE KEY-----<\n{A}\n>-----END OPENSSH PRIVATE KEY-----",
    "pkcs8": f"-----BEGIN PRIVATE KEY-----<\n{A}\n>-----END PRIVATE KEY-----",
    "encrypted": f"-----BEGIN ENCRYPTED PRIVATE KEY-----<\n{A}\n>-----END ENCRYPTED PRIVATE KEY-----",
    "pgp": f"-----BEGIN PGP PRIVATE KEY BLOCK-----<\n{A}\n>-----END PGP PRIVATE KEY BLOCK-----",
    "pem in json": f'"key": "-----BEGIN PRIVATE KEY-----<\\n{A}\\n>-----END PRIVATE KEY-----"',
    "url": "https://bob:<hunter2@x>@registry.example/x",
    "redis": "redis://:<hunter2hunter2>@host:6379/0",
    "database": "postgresql+asyncpg://u:<p%40ss>@db:5432/x",
    "git url": f"git clone https://<{A}>@git.example/x.git",
    "odbc": "Server=db;Uid=u;Pwd=<hunter2>;",
    "option": "train.py --password <hunter2> --steps 3",
    "option with =": "train.py --api-key=<hunter2abc>",
    "option in json": '"--hf-token", "<abcdef>", "--steps"',
    "mysql env": "MYSQL_PWD=<hunter2>",
    "postgres env": "PGPASSWORD=<hunter2>",
    "smtp env": "SMTP_PASS: <hunter2>",
    "passphrase": "ssh_passphrase: <correct-horse>",
    "yaml": "  client_secret: <abc-def-ghi>",
    "json": '"api_key": "<xyz123>",',
    "json in json": r'"said": "{\"api_key\": \"<xyz123>\"}"',
    "python": "os.environ['OPENAI_API_KEY'] = '<abcdef>'",
    "bearer": f"Authorization: <Bearer {A}>",
    "bare bearer": f"header was Bearer <{A}>",
    "basic": "Authorization: <Basic dXNlcjpwYXNz>",
    "bare basic": "sent Basic <dXNlcjpwYXNzd29yZDE=>",
    "other scheme": "Authorization: <Token abcdef123>",
    "api header": "X-API-Key: <abcdef123>",
    "auth header": "X-Auth-Token: <abcdef123>",
    "gitlab header": f"PRIVATE-TOKEN: <{A[:20]}>",
    "cookie": f"Cookie: <session={A}; theme=dark>",
    "set-cookie": f"Set-Cookie: <sid={A}; HttpOnly>",
    "curl": "curl -u bob:<hunter2> https://x",
    "curl long": "curl --user bob:<hunter2> https://x",
    "netrc": f"machine api.wandb.ai login user password <{X[:40]}>",
    "wandb env": f"WANDB_API_KEY=<{X[:40]}>",
    "wandb login": f"wandb login <{X[:40]}>",
    "wandb new": f"<wandb_v1_{A}>",
    "docker": '"auths": {"ghcr.io": {"auth": "<dXNlcjpwYXNzd29yZDEyMw==>"}}',
    "docker identity": f'"identitytoken": "<{A}>"',
    "docker pat": f"<dckr_pat_{A[:27]}>",
    "kaggle": '{"username": "u", "key": "<' + X[:32] + '>"}',
    "nvidia": f"<nvapi-{A}{A[:20]}>",
    "groq": f"<gsk_{A}>",
    "replicate": f"<r8_{A[:37]}>",
    "xai": f"<xai-{A}{A}>",
    "langsmith": f"<lsv2_pt_{X[:32]}_{X[:10]}>",
    "databricks": f"<dapi{X[:32]}>",
    "vault": f"<hvs.{A}>",
    "age": "<AGE-SECRET-KEY-1" + "QPZRY9X8GF2TVDW0S3JN54KHCE6MUA7L" * 2 + ">",
    "stripe": f"<sk_live_{A[:24]}>",
    "sendgrid": f"<SG.{A[:22]}.{A}>",
    "twilio": f"<SK{X[:32]}>",
    "npm": f"<npm_{A[:36]}>",
    "pypi": f"<pypi-AgEIcHlwaS5vcmc{A}>",
    "grafana": f"<glsa_{A[:32]}_{X[:8]}>",
    "tailscale": f"<tskey-auth-{A[:12]}-{A}>",
    "atlassian": f"<ATATT3xFfGF0{A}>",
    "sentry": f"https://<{X[:32]}>@o1.ingest.sentry.io/2",
}  # fmt: skip
TO_THE_END = {"cookie", "set-cookie", "bearer", "basic", "other scheme"}  # of its line: nobody knows where they end
ORDINARY = """
[Step 3] tokens: 4096 | max_tokens: 8 | reward 0.5 | tokens/s: 18234.5 | prompt_tokens: [12, 33]
max_new_tokens=1024 token_ids=[1, 2, 3] num_tokens: 123456789 total_tokens=1.5e+06 eos_token=</s>
pad_token: <pad> tokenizer: fast
2026-11-20 13:24:05,120 INFO trainer step 1284 loss 0.0123 reward 0.51 kl 0.002 lr 3.0e-05 tokens 81920
store.password_file=null keys: 3 monkey: banana key=value keyboard: us
sha256:9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08 commit 3f786850e387550fdab836ed7e6dc881de23001b
http://a:8000 and http://b/@c ssh://git@host/repo tcp://10.0.0.1:2379 user@example.com
NCCL INFO Channel 00/0 : 0[0] -> 1[0] [send] via NET/IB/0/GDRDMA comm 0x5581 commId 0xd8a7f3e5
PWD=/home/u/run OLDPWD=/tmp PATH=/usr/bin:/bin LD_LIBRARY_PATH=/opt/nccl/lib
basic training of Basic blocks; bearer of news; the password was asked for; secret sharing of gradients
{"event": "plan.adopted", "generation": 14, "members": 7, "resume": 1260, "reason": "n03/1 died (lease)"}
Traceback (most recent call last): File "/usr/lib/python3.11/site-packages/torch/nn/modules/module.py", line 1511, in forward
model-00001-of-00004.safetensors local-rank 3 key-value cache sk-learn glpattern SG. SKIPPED eyJ
--tokenizer meta-llama/Llama-3 --max-tokens 512 --seed 7 -u python train.py --user root
""".strip().splitlines()  # fmt: skip


HOSTILE = [
    "a", "-", "eyJ", "eyJaaaaaaaaa.", "://", "://a:", "Bearer ", "Basic A", "token", "token=", "--token ", "[\"'", "\\",
    "_pass", "cookie:", "cookie:a", "login a password ", "wandb login --a ", "-----BEGIN PRIVATE KEY-----", "AKIA", "?sig=",
    "123456789:AA",
    "abc8Q~", "password ", "'auth': '", "x" * 50 + ".", "0Q~", "pwd =", " -u a:", "'key\\", "a=", "token\\", "token ",
]  # fmt: skip


@pytest.mark.parametrize("shape", SECRETS)
def test_a_secret_of_a_usual_form_is_removed_and_nothing_else_is(shape: str) -> None:
    text = SECRETS[shape]
    before, _, rest = text.partition("<")
    secret, _, after = rest.partition(">")
    for lead, end in (("", ""), ("12:01:07 INFO ", "" if shape in TO_THE_END else " (3 s)"), ("x\n", "\ny")):
        said, removed = veiled(f"{lead}{before}{secret}{after}{end}")
        assert secret not in said
        assert removed >= 1
        for part in (before[-12:], after[:12], lead, end):
            assert part in said, said
        left = said.replace(lead, "", 1).replace(HIDDEN, "")
        assert not any(
            secret[i : i + 8] in left for i in range(0, max(1, len(secret) - 8), 4) if secret[i : i + 8].strip()
        )


def test_ordinary_lines_stay_as_they_are() -> None:
    changed = [(line, said) for line in ORDINARY if (said := veiled(line)[0]) != line]
    assert not changed


@pytest.mark.long
@pytest.mark.parametrize("unit", HOSTILE)
def test_a_hostile_line_takes_time_in_proportion_to_its_length(unit: str) -> None:
    def took(size: int) -> float:
        text = unit * (size // len(unit))
        times = []
        for _ in range(2):
            begin = time.process_time()
            veiled(text)
            times.append(time.process_time() - begin)
        return min(times)

    assert took(80_000) < 9 * max(took(20_000), 0.002)


@given(st.text(alphabet=st.sampled_from("aA0=:/@ \"'\\-_.tokenpasswrd\n[]{}"), max_size=200))
def test_what_is_veiled_once_is_veiled(text: str) -> None:
    said, _ = veiled(text)
    assert veiled(said)[0].count(HIDDEN) >= said.count(HIDDEN) or not said
