"""What secrets look like: the names of their settings, their issuers' prefixes, and random-looking texts with such a name.

The launcher uses it too, for sources, settings and logs. Standard library only.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator

_KEYS = (
    "access|account|api|auth|aws|deploy|encryption|kaggle|license|openai|private|sa|secret|service|service_account"
    "|shared|signing|ssh|storage|subscription|wandb"
)
_OF = r"(?:_?[0-9]+|_(?:dev|prod|production|pypi|read|readonly|ro|rw|staging|test|write))*"
"""Suffixes of a name, which tell one of several."""

_SECRET = re.compile(
    rf"(^|_)(({_KEYS})_?keys?(_id)?|token|[a-z]*secrets?|[a-z]*password|passwd|pass|passphrase|pgpass|pwd|pat"
    r"|credentials?|auth(orization)?(_config|_header)?|bearer|cookies|webhook|connection_string|dsn|(jdbc|webhook)_url)"
    rf"{_OF}$"
)
_NONE = re.compile(
    r"(^|_)((audio|bos|class|cls|continuation|dist|distillation|end|eos|image|mask|max|min|num|pad|patch|prompt|public_key|reg|register"
    r"|request|sep|sos|special|start|text|unk|video)_token|(all|backward|band|first|forward|high|last|low|num|one|second|two)_pass)"
    r"(_?[0-9]+)?$"
)
"""Names of a model's tokens and of filters and passes, which hold no secret."""
_WORDS = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|[.\-]")

_ISSUED = {
    "a private key": (("PRIVATE KEY",), r"-----BEGIN (?:[A-Z]+ )*PRIVATE KEY(?: BLOCK)?-----"),
    "a PuTTY key": (("PuTTY-",), r"PuTTY-User-Key-File-[0-9]"),
    # https://age-encryption.org/v1
    "an age key": (("AGE-SECRET-KEY-",), r"AGE-SECRET-KEY-1[02-9AC-HJ-NP-Z]{58}"),
    # those of AWS's documentation end in EXAMPLE
    # https://docs.aws.amazon.com/IAM/latest/UserGuide/reference_identifiers.html#identifiers-unique-ids
    "an AWS access key": (("AKIA", "ASIA"), r"A(?:KIA|SIA)(?![A-Z2-7]{9}EXAMPLE)[A-Z2-7]{16}"),
    # https://huggingface.co/docs/hub/security-tokens
    "a Hugging Face token": (("hf_",), r"hf_[A-Za-z]{34}"),
    # https://docs.github.com/en/authentication (token formats)
    "a GitHub token": (
        ("ghp_", "gho_", "ghu_", "ghs_", "ghr_", "github_pat_"),
        r"(?:gh[pousr]_[A-Za-z0-9]{36}|github_pat_[A-Za-z0-9_]{82})",
    ),
    # https://docs.gitlab.com/security/tokens
    "a GitLab token": (
        ("glpat-", "gldt-", "glrt-", "glcbt-", "glptt-", "glft-", "glsoat-"),
        r"gl(?:pat|dt|rt|cbt|ptt|ft|soat)-[A-Za-z0-9_-]{20,}",
    ),
    # https://docs.slack.dev/authentication/tokens
    "a Slack token": (("xox",), r"xox[abeoprs]-[0-9]+-[A-Za-z0-9-]{10,}"),
    "a Slack webhook": (("hooks.slack.com",), r"hooks\.slack\.com/services/T\w+/B\w+/\w{20,}"),
    "a Discord webhook": (("/api/webhooks/",), r"discord(?:app)?\.com/api/webhooks/[0-9]{17,}/[A-Za-z0-9_-]{60,}"),
    "an OpenAI key": (
        ("sk-",),
        r"sk-(?:(?:proj|svcacct|admin)-[A-Za-z0-9_-]{40,}|[A-Za-z0-9]{20}T3BlbkFJ[A-Za-z0-9]{20})",
    ),
    "an Anthropic key": (("sk-ant-",), r"sk-ant-[a-z0-9]+-[A-Za-z0-9_-]{80,}"),
    "a Groq key": (("gsk_",), r"gsk_[A-Za-z0-9]{40,}"),
    "a Replicate token": (("r8_",), r"r8_[A-Za-z0-9]{37}"),
    "an NVIDIA key": (("nvapi-",), r"nvapi-[A-Za-z0-9_-]{60,}"),
    "a Weights & Biases key": (
        ("wandb",),
        r"(?:wandb_v1_[A-Za-z0-9_]{40,}|wandb[. ]login[ (][^\n]{0,60}?(?<![A-Za-z0-9])[0-9a-f]{40})",
    ),
    "an xAI key": (("xai-",), r"xai-[A-Za-z0-9]{60,}"),
    # https://docs.cloud.google.com/docs/authentication/api-keys
    "a Google key": (("AIza", "GOCSPX-"), r"(?:AIza[A-Za-z0-9_-]{35}|GOCSPX-[A-Za-z0-9_-]{28})"),
    "an Azure storage key": (("AccountKey=",), r"AccountKey=[A-Za-z0-9+/]{86}=="),
    # https://learn.microsoft.com/en-us/rest/api/storageservices/create-service-sas
    "an Azure shared access signature": (("sig=",), r"sig=[A-Za-z0-9%+/]{43,130}(?:=|%3[Dd])"),
    "a Databricks token": (("dapi",), r"dapi[0-9a-f]{32}(?:-[0-9])?"),
    "a DigitalOcean token": (("_v1_",), r"do[opr]_v1_[0-9a-f]{64}"),
    # https://docs.stripe.com/keys
    "a Stripe key": (("_live_",), r"[sr]k_live_[A-Za-z0-9]{24,}"),
    "a SendGrid key": (("SG.",), r"SG\.[A-Za-z0-9_-]{22}\.[A-Za-z0-9_-]{43}"),
    "a Twilio key": (("SK",), r"SK[0-9a-f]{32}"),
    "a Telegram token": ((":AA",), r"[0-9]{8,10}:AA[A-Za-z0-9_-]{33}"),
    # https://docs.npmjs.com/about-access-tokens and https://pypi.org/help/#apitoken
    "an npm token": (("npm_",), r"npm_[A-Za-z0-9]{36}"),
    "a PyPI token": (("pypi-",), r"pypi-AgE[A-Za-z0-9_-]{70,}"),
    "a Docker Hub token": (("dckr_pat_",), r"dckr_pat_[A-Za-z0-9_-]{27}"),
    "a Vault token": (("hvs.",), r"hvs\.[A-Za-z0-9_-]{24,}"),
    # https://developer.hashicorp.com/terraform/cloud-docs/users-teams-organizations/api-tokens
    "a Terraform token": ((".atlasv1.",), r"[A-Za-z0-9]{14}\.atlasv1\.[A-Za-z0-9_-]{60,}"),
    # https://grafana.com/docs/grafana/latest/administration/service-accounts
    "a Grafana token": (("glsa_", "glc_"), r"(?:glsa_[A-Za-z0-9]{32}_[0-9a-f]{8}|glc_[A-Za-z0-9+/]{32,}={0,2})"),
    # https://developers.notion.com/page/changelog
    "a Notion token": (("ntn_", "secret_"), r"(?:ntn_[A-Za-z0-9]{40,}|secret_[A-Za-z0-9]{43})"),
    # https://airtable.com/developers/web/guides/personal-access-tokens
    "an Airtable token": (("pat",), r"pat[A-Za-z0-9]{14}\.[0-9a-f]{64}"),
    # https://shopify.dev/docs/apps/build/authentication-authorization/access-tokens
    "a Shopify token": (("shp",), r"shp(?:at|ca|pa|ss)_[0-9a-fA-F]{32}"),
    # https://docs.sentry.io/concepts/key-terms/dsn-explainer
    "a Sentry DSN": (("://",), r"https?://[0-9a-f]{32}(?::[0-9a-f]{32})?@[\w.-]+(?::[0-9]+)?/[0-9]+"),
    "a New Relic key": (("NRAK-",), r"NRAK-[A-Z0-9]{27}"),
    "a JSON web token": ((".eyJ",), r"eyJ[A-Za-z0-9_-]{10,}\.eyJ[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]{20,}"),
}
"""Kind -> texts, of which each match holds one (a fast check first), and its regular expression."""

_PATTERNS = {
    kind: ([sign.encode() for sign in signs], re.compile(rf"(?<![A-Za-z0-9]){pattern}(?![A-Za-z0-9])".encode()))
    for kind, (signs, pattern) in _ISSUED.items()
}

_ASSIGNED = re.compile(
    rb"((?i:(?:key|key_id|token|secrets?|passw(?:or)?d|pass|pwd|pat|credentials?|auth|bearer|cookies?|connection_string)%b))"
    rb"(?:\\?[\"'])?\]?[ \t]{0,3}(?::|=>?)[ \t]{0,3}(?:\\?[\"']([^\s\"'<>{}$\\]{16,200})\\?[\"']|([^\s\"'<>{}$(),;]{16,200})[ \t]*\r?$)"
    % _OF.encode(),
    re.MULTILINE,
)
"""The end of a name and the text assigned to it: in quotes, or to the end of the line."""

_NAME = re.compile(rb"[A-Za-z_][\w.-]{0,60}$")

_QUOTED = re.compile(
    r"""(?<![\w.])([A-Za-z_][\w.]*)
    (?: ["']?\]?\s* (?: :[^"'=,()]{0,60} )? !?= | ["']\s*[:,] )  # of a name, perhaps with its type or as a key, or of a key
    [=\s(\[]* [A-Za-z]{0,2} (?: ["'] | ["']{3} ) [^"'\s]""",
    re.VERBOSE,
)
"""In Python, a name and the start of a quoted text that it is assigned or compared with."""

_TEXT = re.compile(r"""(["'])(?:\\.|(?!\1).)*\1""")
"""A quoted text of Python."""

_PARAMETER = re.compile(r"""([A-Za-z_][\w.-]*)=[^\s&;"'{}<>]""")
"""Within a text, a name with a value, as in a URL's query or a connection string; the value is no placeholder of an f-string."""

_BEARER = re.compile(
    rb"(?i:authorization)(?:\\?[\"'])?\]?[ \t]{0,3}[:=,][ \t]{0,3}(?:\\?[\"'])?(?i:basic|bearer|token)[ \t]+([\w.~+/=-]{16,2000})"
)
"""A request's header with a token: RFC 6750, section 2.1."""

_IN_URL = re.compile(rb"://[^\s/@:\"']{0,80}:([^\s/@\"'<>{}$]{4,200})@[A-Za-z0-9]")

_EXAMPLE = re.compile(
    r"example|your|placeholder|changeme|dummy|sample|insert|secret|password|xxxx|\.\.\.|^\*+$|test", re.IGNORECASE
)

_UUID = re.compile(r"[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}")
"""Most of these are identifiers."""

_NAME_OR_PATH = re.compile(r"[\w-]*(?:\.[a-z_][\w-]*)+|[a-z0-9_.~-]*(?:/[a-z0-9_.-]*)+")

_RANDOM_BITS = 3.0
"""Shannon entropy of a text's characters above which it may be random: 40 hexadecimal digits have 3.5 to 3.9, words some 3."""


def names_a_secret(name: str) -> bool:
    """Whether a setting of this name holds a secret: HF_TOKEN and apiKey do, num_tokens and key_frames do not."""
    words = _WORDS.sub("_", name).lower()
    return name not in ("PWD", "OLDPWD") and bool(_SECRET.search(words)) and not _NONE.search(words)


def secrets_in_text(content: bytes) -> dict[str, int]:
    """What looks like a secret in a text -> the byte at which it begins."""
    found: dict[str, int] = {}
    for kind, start in _found(content):
        found[kind] = min(start, found.get(kind, start))
    return found


def shows_a_secret(line: str) -> bool:
    """Whether a line of Python seems to hold a secret: what looks like one, or any text given to a secret's name, quoted or within a
    quoted text."""
    within = (name for text in _TEXT.finditer(line) for name in _PARAMETER.findall(text[0]))
    names = (*_QUOTED.findall(line), *within)
    return bool(secrets_in_text(line.encode("utf-8", "replace"))) or any(map(names_a_secret, names))


def _found(content: bytes) -> Iterator[tuple[str, int]]:
    for kind, (signs, pattern) in _PATTERNS.items():
        if any(sign in content for sign in signs) and (match := pattern.search(content)) is not None:
            yield kind, match.start()
    for match in _ASSIGNED.finditer(content):
        name = _NAME.search(content, max(0, match.end(1) - 60), match.end(1))
        setting = name[0].decode("utf-8", "replace") if name is not None else ""
        if names_a_secret(setting) and is_random((match[2] or match[3]).decode("utf-8", "replace")):
            yield f"a value of {setting}", match.start()
    for match in _BEARER.finditer(content):
        if is_random(match[1].decode("utf-8", "replace")):
            yield "an Authorization header", match.start()
    for match in _IN_URL.finditer(content):
        password = match[1].decode("utf-8", "replace")
        if not (_EXAMPLE.search(password) or password.startswith("%") or password.isalpha() and password.islower()):
            yield "a URL with a password", match.start()


def is_random(text: str) -> bool:
    """Whether a text looks like a key or a generated password: mixed characters, and no example, identifier, path or name in code."""
    if _EXAMPLE.search(text) or _UUID.fullmatch(text) or _NAME_OR_PATH.fullmatch(text):
        return False
    kinds = ["digit" if one.isdigit() else "capital" if one.isupper() else "other" for one in text]
    changes = sum(kind != after for kind, after in zip(kinds, kinds[1:]))
    counts = Counter(text)
    bits = -sum(count / len(text) * math.log2(count / len(text)) for count in counts.values())
    mixed = changes >= len(text) * (0.25 if "digit" in kinds else 0.4)
    return mixed and bits >= min(_RANDOM_BITS, math.log2(len(text)) * 0.8)
