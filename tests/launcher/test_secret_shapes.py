"""How many secrets in 100 files are found, and how many of 100 files without one are suspected; and what is redacted."""

from __future__ import annotations

import base64
import hashlib
import json
import random
import string
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import timm

from launcher.config import redaction
from launcher.config.secret_shapes import secrets_in_text
from tests.conftest import ROOT

WORDS, HEX, UPPER = string.ascii_letters + string.digits, "0123456789abcdef", string.ascii_uppercase + "234567"

# name of the setting, and parts of the token: text, or (characters, length)
TOKENS: list[tuple[str, list[str | tuple[str, int]]]] = [
    ("aws_access_key_id", ["AKIA", (UPPER, 16)]),
    ("aws_secret_access_key", [(WORDS + "+/", 40)]),
    ("HF_TOKEN", ["hf_", (string.ascii_letters, 34)]),
    ("anything", ["ghp_", (WORDS, 36)]),
    ("anything", ["github_pat_", (WORDS, 22), "_", (WORDS, 59)]),
    ("anything", ["glpat-", (WORDS + "_-", 20)]),
    ("anything", ["xoxb-", (string.digits, 12), "-", (string.digits, 12), "-", (WORDS, 24)]),
    ("url", ["https://hooks.slack.com/services/T", (UPPER, 8), "/B", (UPPER, 8), "/", (WORDS, 24)]),
    ("url", ["https://discord.com/api/webhooks/", (string.digits, 18), "/", (WORDS + "_-", 68)]),
    ("anything", ["sk-", (WORDS, 20), "T3BlbkFJ", (WORDS, 20)]),
    ("anything", ["sk-proj-", (WORDS + "_-", 48)]),
    ("anything", ["sk-ant-api03-", (WORDS + "_-", 93), "AA"]),
    ("anything", ["gsk_", (WORDS, 52)]),
    ("anything", ["r8_", (WORDS, 37)]),
    ("anything", ["nvapi-", (WORDS + "_-", 64)]),
    ("WANDB_API_KEY", [(HEX, 40)]),
    ("anything", ["AIza", (WORDS + "_-", 35)]),
    ("connection", ["AccountName=data;AccountKey=", (WORDS + "+/", 86), "=="]),
    ("anything", ["dapi", (HEX, 32)]),
    ("anything", ["dop_v1_", (HEX, 64)]),
    ("anything", ["sk_live_", (WORDS, 24)]),
    ("anything", ["SG.", (WORDS, 22), ".", (WORDS, 43)]),
    ("anything", ["SK", (HEX, 32)]),
    ("anything", [(string.digits, 10), ":AA", (WORDS + "_-", 33)]),
    ("anything", ["npm_", (WORDS, 36)]),
    ("anything", ["pypi-AgEIcHlwaS5vcmc", (WORDS + "_-", 120)]),
    ("anything", ["dckr_pat_", (WORDS, 27)]),
    ("anything", ["eyJ", (WORDS, 34), ".eyJ", (WORDS, 80), ".", (WORDS + "_-", 43)]),
    ("kaggle_key", [(HEX, 32)]),
    ("database_password", [(WORDS + "!#%&*", 20)]),
    ("COMET_API_KEY", [(WORDS, 25)]),
    ("database", ["postgresql://trainer:", (WORDS, 18), "@db.internal:5432/runs"]),
    ("queue", ["redis://:", (WORDS, 6), "@cache.internal:6379/0"]),
    ("key", ["-----BEGIN PGP ", "PRIVATE KEY BLOCK-----"]),
    ("anything", ["PuTTY-User-", "Key-File-3: ssh-ed25519"]),
    ("anything", ["AGE-SECRET-KEY-1", ("QPZRY9X8GF2TVDW0S3JN54KHCE6MUA7L", 58)]),
    ("header", ["Authorization: Bearer ", (WORDS, 32)]),
    ("command", ["wandb login ", (HEX, 40)]),
    ("tracker", ["wandb.login(key=\\'", (HEX, 40), "\\')"]),
    ("url", ["https://", (HEX, 32), "@o12345.ingest.sentry.io/6789"]),
    ("url", ["https://data.blob.core.windows.net/c?sv=2022-11-02&sig=", (WORDS, 43), "%3D"]),
    ("anything", ["ntn_", (WORDS, 46)]),
    ("anything", ["secret_", (WORDS, 43)]),
    ("anything", ["pat", (WORDS, 14), ".", (HEX, 64)]),
    ("anything", ["shpat_", (HEX, 32)]),
    ("anything", ["glsa_", (WORDS, 32), "_", (HEX, 8)]),
    ("anything", ["xai-", (WORDS, 80)]),
    ("anything", [(WORDS, 14), ".atlasv1.", (WORDS, 67)]),
    ("OPENAI_API_KEY_PROD", [(WORDS, 40)]),
    ("index", ["https://__token__:", (WORDS, 24), "@pypi.internal/simple"]),
]

FILES: list[Callable[[str, str], str]] = [
    lambda name, token: f'import os\n\nRATE = 0.1\n{name} = "{token}"\n\ndef main():\n    print(RATE)\n',
    lambda name, token: f"model: resnet18\nlogging:\n  {name}: {token}\n  level: info\n",
    lambda name, token: f"#!/bin/sh\nset -e\nexport {name}={token}\npython train.py --epochs 3\n",
    lambda name, token: json.dumps(
        {"cells": [{"source": ["import os\n", f"os.environ['{name}'] = '{token}'\n"]}]}, indent=1
    ),
]


def planted(rng: random.Random) -> Iterator[str]:
    """100 files with one secret each."""
    for number in range(100):
        name, parts = TOKENS[number % len(TOKENS)]
        token = "".join(part if isinstance(part, str) else "".join(rng.choices(part[0], k=part[1])) for part in parts)
        yield FILES[(number // len(TOKENS) + number) % len(FILES)](name, token)


def clean(rng: random.Random) -> Iterator[str]:
    """100 files without one: 60 of what is random by nature, and 40 that exist."""

    def digest(kind: str) -> str:
        return hashlib.new(kind, rng.randbytes(8)).hexdigest()

    def integrity() -> str:
        return base64.b64encode(rng.randbytes(64)).decode()

    for _ in range(5):
        picture = base64.b64encode(rng.randbytes(40_000)).decode()
        yield "".join(f"package-{n}==1.{n} \\\n    --hash=sha256:{digest('sha256')}\n" for n in range(60))
        yield json.dumps(
            {
                "packages": {
                    f"node_modules/p{n}": {"version": "1.0.0", "integrity": f"sha512-{integrity()}"} for n in range(60)
                }
            },
            indent=2,
        )
        yield json.dumps(
            {"cells": [{"outputs": [{"data": {"image/png": picture}}], "source": ["plt.show()"]}]}, indent=1
        )
        yield f"<img src='data:image/png;base64,{picture}'>\n<script nonce='{digest('md5')}'></script>\n"
        yield "".join(
            f"- id: {uuid.UUID(int=rng.getrandbits(128))}\n  key: images/{digest('sha1')}.jpg\n" for _ in range(60)
        )
        yield "".join(f"{digest('sha256')}  model-{n}.safetensors\n" for n in range(60))
        yield "".join(f"commit {digest('sha1')}\nAuthor: A <a@b.c>\n\n    Tokens are counted\n\n" for _ in range(60))
        yield "HF_TOKEN=<your token>\nWANDB_API_KEY=your-api-key\nexport DB_PASSWORD=changeme\nexport API_KEY=${API_KEY}\nSECRET_KEY=xxxxxxxxxxxxxxxxxxxxxxxx1\n"
        yield "import os, getpass\ntoken = os.environ['HF_TOKEN']\npassword = getpass.getpass()\napi_key: str = field(default='')\nself.token = token_from(config.auth.v2.token_file)\n"
        yield "services:\n  db:\n    environment:\n      POSTGRES_PASSWORD: ${POSTGRES_PASSWORD}\n      URL: postgresql://user:password@localhost/db\n"
        yield json.dumps(
            {
                "vocab": {"".join(rng.choices(WORDS, k=7)): n for n in range(2000)},
                "pad_token": "<|pad|>",
                "eos_token": "<|endoftext|>",
            }
        )
        yield f"-----BEGIN CERTIFICATE-----\n{picture[:1600]}\n-----END CERTIFICATE-----\nssh-ed25519 {picture[:68]} a@b\n"
    code = sorted(Path(timm.__file__).parent.rglob("*.py"))[::12][:20]
    own = [
        file
        for pattern in ("notebooks/*.ipynb", "configs/*.yaml", "docs/*.md", "pyproject.toml")
        for file in sorted(ROOT.glob(pattern))
    ]
    yield from (file.read_text(encoding="utf-8") for file in [*code, *own[: 40 - len(code)]])


def test_nearly_every_planted_secret_is_found_and_hardly_a_clean_file_is_suspected():
    with_one, without = list(planted(random.Random(1))), list(clean(random.Random(2)))
    assert (len(with_one), len(without)) == (100, 100) and len(set(with_one + without)) > 180
    missed = [text for text in with_one if not secrets_in_text(text.encode())]
    suspected = [(secrets_in_text(text.encode()), text[:80]) for text in without if secrets_in_text(text.encode())]
    assert len(missed) <= 1, missed
    assert suspected == []


def test_awss_documented_example_keys_are_no_secrets():
    example = (
        "aws_access_key_id = AKIAIOSFODNN7EXAMPLE\naws_secret_access_key = wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY\n"
    )
    assert secrets_in_text(example.encode()) == {}


def test_a_variable_whose_value_is_a_token_is_redacted_whatever_its_name():
    token = "ghp_" + "a1B2" * 9
    shown = redaction.redact({"MINE": token, "URL": "https://a:b1c2@host", "COMMIT": "3f" * 20, "PLAIN": "text"})
    assert shown == {"MINE": "***", "URL": "***", "COMMIT": "3f" * 20, "PLAIN": "text"}


def test_secrets_of_a_command_line_are_redacted():
    words = ["train.py", "--lr", "0.1", "--num_tokens", "5", "--api-key", "abc", "--password=abc", "HF_TOKEN=abc", "-x"]
    assert redaction.redact_command([*words, "https://me:abcd@host/x", "sh -c 'WANDB_API_KEY=abc python'"]) == [
        *("train.py", "--lr", "0.1", "--num_tokens", "5", "--api-key", "***", "--password=***", "HF_TOKEN=***", "-x"),
        *("***", "***"),
    ]
    within = [
        "python login.py --password hunter2 && python train.py",
        "python train.py --api-key s3cr3t",
        '{"password": "hunter2"}',
        "python login.py --password hunter2 && WANDB_API_KEY=abc python train.py",
        '{"password": 123456}',
        "echo it's on && python login.py --password hunter2",
    ]
    assert redaction.redact_command(["bash", "-c", *within]) == ["bash", "-c", *["***"] * 6]
    assert redaction.redact_command(["+db.password=$ecr3t"]) == ["+db.password=***"], "Hydra's"
    harmless = ["python train.py --lr 0.1 && echo 'done'", '{"lr": 0.1, "name": "it\'s"}', "it's", ""]
    assert redaction.redact_command(harmless) == harmless
