"""Access control of the emulator: requests must be signed with its own keys, sent to its own address, and come from no web page.

botocore recomputes each signature from the request as it arrived.
https://docs.aws.amazon.com/IAM/latest/UserGuide/reference_sigv-create-signed-request.html
"""

from __future__ import annotations

import calendar
import contextlib
import hashlib
import hmac
import re
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qsl, urlsplit
from xml.sax.saxutils import escape

from botocore import auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials
from moto.core.request import environ_key_for_header
from werkzeug.wrappers import Response

from launcher.emulator import router

NAMES = ("127.0.0.1", "localhost")

MAX_SKEW_SECONDS = 300
"""Seconds that a signature's time may differ from now.
https://docs.aws.amazon.com/IAM/latest/UserGuide/reference_sigv-troubleshooting.html"""

UNSIGNED_PAYLOADS = ("UNSIGNED-PAYLOAD", "STREAMING-UNSIGNED-PAYLOAD-TRAILER")
"""What S3 also accepts as a body's hash. https://docs.aws.amazon.com/AmazonS3/latest/API/sig-v4-header-based-auth.html"""

AUTHORIZATION = re.compile(
    r"AWS4-HMAC-SHA256 Credential=([^/,\s]+)/\d{8}/([^/,\s]+)/([^/,\s]+)/aws4_request, *"
    r"SignedHeaders=([^,\s]+), *Signature=(\w+)"
)
"""The header: access key, region, service, signed headers, signature."""

FIX = "export what `launcher emulate` printed, or take Emulator.environment"

CODES = {
    "foreign": ("AccessDenied", "AccessDenied", "AccessDeniedException"),
    "unsigned": ("AccessDenied", "MissingAuthenticationToken", "MissingAuthenticationTokenException"),
    "key": ("InvalidAccessKeyId", "InvalidClientTokenId", "UnrecognizedClientException"),
    "signature": ("SignatureDoesNotMatch", "SignatureDoesNotMatch", "InvalidSignatureException"),
    "body": ("XAmzContentSHA256Mismatch", "SignatureDoesNotMatch", "InvalidSignatureException"),
    "time": ("RequestTimeTooSkewed", "SignatureDoesNotMatch", "InvalidSignatureException"),
    "expired": ("AccessDenied", "SignatureDoesNotMatch", "InvalidSignatureException"),
    "length": ("EntityTooLarge", "RequestEntityTooLarge", "RequestEntityTooLargeException"),
    "chunks": ("IncompleteBody", "MalformedHttpRequest", "MalformedHttpRequestException"),
}
"""What is wrong -> the error code of S3, of the Query protocol's services, and of JSON services."""


class Refused(Exception):
    """A request that is not the user's. `wrong` is a key of CODES."""

    def __init__(self, wrong: str, message: str):
        super().__init__(message)
        self.wrong = wrong


@dataclass(frozen=True)
class Version4:
    """AWS's signature of a request, in its header or in a presigned URL."""

    access_key: str
    region: str
    service: str
    """The signing name."""
    headers: list[str]
    """The signed headers."""
    value: str
    stamp: str
    """The time of signing, as 20260131T235959Z."""
    seconds: int
    """The time of signing, since the epoch."""
    valid_seconds: str | None
    """Lifetime of a presigned URL; None for a signed header."""

    def computed(self, environ: dict[str, Any], key: Credentials) -> str:
        """The signature that a key gives the request."""
        of_s3, in_url = self.service == "s3", self.valid_seconds is not None
        kind = (auth.S3SigV4QueryAuth if in_url else auth.S3SigV4Auth) if of_s3 else auth.SigV4Auth
        request = _request(environ, {name: environ_key_for_header(name) for name in self.headers})
        query = parse_qsl(environ["QUERY_STRING"], keep_blank_values=True)
        request.params = [(name, value) for name, value in query if name != "X-Amz-Signature"]
        request.data = b"" if of_s3 else _body(environ)  # S3's hash is a header, which `check` compares
        request.context["timestamp"] = self.stamp
        signer = kind(key, self.service, self.region)
        return str(signer.signature(signer.string_to_sign(request, signer.canonical_request(request)), request))

    def check(self, environ: dict[str, Any]) -> None:
        """Check what the signature itself does not prove: its time, the body, and that it covers AWS's headers.

        Raises:
            Refused: one of them is wrong.
        """
        signed = {environ_key_for_header(name) for name in self.headers}
        loose = [name for name in environ if name.startswith("HTTP_X_AMZ_") and name not in signed]
        if loose:
            raise Refused("unsigned", f"headers of the request are not signed: {', '.join(loose)}")
        claimed = environ.get("HTTP_X_AMZ_CONTENT_SHA256")
        if claimed is None and self.service == "s3" and self.valid_seconds is None:
            raise Refused("unsigned", "the request has no x-amz-content-sha256 header")
        free = claimed is None or (self.service == "s3" and claimed in UNSIGNED_PAYLOADS)
        if not free and claimed != hashlib.sha256(_body(environ)).hexdigest():
            raise Refused("body", "the request's body is not the one whose hash is in x-amz-content-sha256")
        age = time.time() - self.seconds
        if self.valid_seconds is not None and not -MAX_SKEW_SECONDS < age < int(self.valid_seconds):
            raise Refused("expired", "the presigned URL has expired")
        if self.valid_seconds is None and abs(age) > MAX_SKEW_SECONDS:
            raise Refused(
                "time", f"Signature expired: its time is {self.stamp}, {age:.0f} s ago by the emulator's clock"
            )


@dataclass(frozen=True)
class Version2:
    """The signature of URLs that boto3 presigns by default.

    https://docs.aws.amazon.com/AmazonS3/latest/API/RESTAuthentication.html
    """

    access_key: str
    value: str
    expires: str
    """Seconds since the epoch."""
    region, service, stamp = "us-east-1", "s3", "00000000"

    def computed(self, environ: dict[str, Any], key: Credentials) -> str:
        signer = auth.HmacV1QueryAuth(key)
        signer._get_date = lambda: self.expires  # instead of a time from now
        names = [
            name for name in environ if name.startswith("HTTP_X_AMZ_") or name in ("CONTENT_TYPE", "HTTP_CONTENT_MD5")
        ]
        request = _request(environ, {name.removeprefix("HTTP_").replace("_", "-"): name for name in names})
        return str(signer.get_signature(request.method, urlsplit(request.url), request.headers))

    def check(self, environ: dict[str, Any]) -> None:
        """Raises Refused if the URL has expired."""
        if time.time() > int(self.expires):
            raise Refused("expired", "the presigned URL has expired")


class Authenticator:
    """WSGI middleware that passes on only requests signed with its keys."""

    def __init__(self, inside: Any, keys: Sequence[Credentials]):
        self.inside = inside
        self.keys = {key.access_key: key for key in keys}

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Any:
        try:
            self.check(environ)
        except Refused as refused:
            return _answer(environ, refused)(environ, start_response)
        return self.inside(environ, start_response)

    def check(self, environ: dict[str, Any]) -> None:
        """Let a request pass, and name its service in its Authorization header.

        Raises:
            Refused: it is for another host, comes from a web page, is not signed with one of the keys, or is too large.
        """
        port = environ["SERVER_PORT"]
        own = [name if port == "80" else f"{name}:{port}" for name in NAMES]
        if environ.get("HTTP_HOST", "").lower() not in own:
            raise Refused("foreign", f"the emulator is {' or '.join(own)} and serves no other host")
        if "HTTP_ORIGIN" in environ:
            raise Refused("foreign", "the emulator serves no page of a browser")
        signature = read_signature(environ)
        key = self.keys.get(signature.access_key)
        if key is None:
            raise Refused("key", f"{signature.access_key} is not this emulator's access key; {FIX}")
        if not hmac.compare_digest(signature.value.encode(), signature.computed(environ, key).encode()):
            raise Refused("signature", f"the request is not signed with this emulator's secret key; {FIX}")
        signature.check(environ)
        _body(environ)  # even if it is not signed
        scope = f"{key.access_key}/{signature.stamp[:8]}/{signature.region}/{signature.service}/aws4_request"
        environ["HTTP_AUTHORIZATION"] = f"AWS4-HMAC-SHA256 Credential={scope}"  # moto guesses a presigned URL's service


def new_credentials(begin: str = "EMULATOR") -> Credentials:
    """Random credentials, whose access key begins with a word."""
    return Credentials(f"{begin}{secrets.token_hex(6).upper()}", secrets.token_hex(20))


def read_signature(environ: dict[str, Any]) -> Version4 | Version2:
    """The signature that a request comes with, not yet checked.

    Raises:
        Refused: it has none.
    """
    query = dict(parse_qsl(environ["QUERY_STRING"], keep_blank_values=True))
    if query.get("Expires", "").isdecimal() and {"AWSAccessKeyId", "Signature"} <= query.keys():
        return Version2(query["AWSAccessKeyId"], query["Signature"], query["Expires"])
    given, stamp, valid = environ.get("HTTP_AUTHORIZATION", ""), environ.get("HTTP_X_AMZ_DATE", ""), None
    if "X-Amz-Signature" in query:
        parts = {name: query.get(f"X-Amz-{name}", "") for name in ("Credential", "SignedHeaders", "Signature")}
        given = f"{query.get('X-Amz-Algorithm')} " + ", ".join(f"{name}={value}" for name, value in parts.items())
        stamp, valid = query.get("X-Amz-Date", ""), query.get("X-Amz-Expires", "")
    found = AUTHORIZATION.fullmatch(given)
    with contextlib.suppress(ValueError):
        seconds = calendar.timegm(time.strptime(stamp, auth.SIGV4_TIMESTAMP))
        if found and (valid is None or valid.isdecimal()):
            access_key, region, service, headers, value = found.groups()
            return Version4(access_key, region, service, headers.split(";"), value, stamp, seconds, valid)
    raise Refused("unsigned", f"the emulator answers only requests with AWS's signature version 4; {FIX}")


def _request(environ: dict[str, Any], headers: dict[str, str]) -> Any:
    """A request as botocore's signers read it, with headers by their names in the WSGI environment."""
    found = {name: environ.get(key, "") for name, key in headers.items()}
    return AWSRequest(environ["REQUEST_METHOD"], f"http://{environ['HTTP_HOST']}{environ['RAW_URI']}", found)


def _body(environ: dict[str, Any]) -> bytes:
    """The body of a request whose access key is known by now.

    Raises:
        Refused: it is too large or cannot be read.
    """
    try:
        return router.body(environ)
    except router.BodyTooLarge:
        raise Refused("length", f"the emulator takes bodies of up to {router.MAX_BODY:,} bytes") from None
    except OSError as error:
        raise Refused("chunks", f"the request's body cannot be read: {error}") from None


def _answer(environ: dict[str, Any], refused: Refused) -> Response:
    """AWS's answer to a refused request, in the protocol of its service."""
    of_s3, of_query, of_json = CODES[refused.wrong]
    _, service = router.scope(environ)
    if service == "ec2":
        around, code = "<Response><Errors>{}</Errors></Response>", "AuthFailure"
    elif environ.get("CONTENT_TYPE", "").startswith("application/x-www-form-urlencoded"):
        around, code = "<ErrorResponse>{}</ErrorResponse>", of_query
    elif service in ("", "s3") and "HTTP_X_AMZ_TARGET" not in environ:
        around, code = "{}", of_s3
    else:
        return router.error(of_json, str(refused), 403)
    error = f"<Error><Code>{code}</Code><Message>{escape(str(refused))}</Message></Error>"
    return Response(around.format(error), 403, {"x-amzn-ErrorType": code}, content_type="application/xml")
