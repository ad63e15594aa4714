"""The emulator answers requests that its own key signed, whatever their form, and nothing else."""

from __future__ import annotations

import http.client
import io
import os
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from datetime import timedelta
from urllib.parse import urlsplit

import boto3
import botocore.auth
import pytest
from botocore import UNSIGNED
from botocore.auth import S3SigV4Auth, SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.compat import get_current_datetime
from botocore.config import Config
from botocore.credentials import Credentials
from botocore.exceptions import ClientError

from launcher.emulator import Emulator, router
from tests.emulator.conftest import BUCKET, REGION, SAY, Aws


def send(
    url: str, method: str = "GET", path: str = "/", headers: dict | None = None, body: bytes = b""
) -> tuple[int, str]:
    """A request as it stands: its status and its answer. Host is the address unless the headers name one."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=30)
    connection.putrequest(method, path, skip_host="Host" in (headers or {}))
    for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
        connection.putheader(name, value)
    connection.endheaders(body)
    answer = connection.getresponse()
    text = answer.read().decode(errors="replace")
    assert answer.status != 403 or not answer.getheader("Access-Control-Allow-Origin")
    connection.close()
    return answer.status, text


def signed(
    aws: Aws, method: str, path: str, headers: dict | None = None, body: bytes = b"", service: str = "s3"
) -> dict:
    """The headers of a request that the emulator's key signed; `headers` may name another Host."""
    request = AWSRequest(method, aws.url + path, headers, body)
    signer = S3SigV4Auth if service == "s3" else SigV4Auth
    signer(Credentials(*aws.credentials), service, REGION).add_auth(request)
    return dict(request.headers)


def client(emulator: Emulator, service: str, access_key: str | None = None, secret: str = "testing", **config):
    key = access_key or emulator.environment["AWS_ACCESS_KEY_ID"]
    return boto3.Session(key, secret, region_name=REGION).client(
        service, endpoint_url=emulator.url, config=Config(retries={"max_attempts": 1}, **config)
    )


CALLS = {
    "s3": lambda s3: s3.put_object(Bucket=BUCKET, Key="foreign", Body=b"x"),
    "sts": lambda sts: sts.get_caller_identity(),
    "ec2": lambda ec2: ec2.describe_vpcs(),
    "efs": lambda efs: efs.describe_file_systems(),
    "sagemaker": lambda sagemaker: sagemaker.describe_training_job(TrainingJobName="x"),
}
"""A call of each of AWS's protocols."""


@pytest.mark.parametrize(
    "service, of_key, of_secret, of_nothing",
    [
        ("s3", "InvalidAccessKeyId", "SignatureDoesNotMatch", "AccessDenied"),
        ("sts", "InvalidClientTokenId", "SignatureDoesNotMatch", "MissingAuthenticationToken"),
        ("ec2", "AuthFailure", "AuthFailure", "MissingAuthenticationToken"),
        ("efs", "UnrecognizedClientException", "InvalidSignatureException", "AccessDenied"),
        (
            "sagemaker",
            "UnrecognizedClientException",
            "InvalidSignatureException",
            "MissingAuthenticationTokenException",
        ),
    ],
)
def test_a_wrong_key_gets_the_services_own_error(emulator, service, of_key, of_secret, of_nothing):
    of_jobs = emulator.jobs.services.environment["AWS_ACCESS_KEY_ID"]
    wrong = [
        (client(emulator, service, access_key="testing"), of_key, "testing is not this emulator's access key"),
        (client(emulator, service, access_key="SAGEMAKER"), of_key, "not this emulator's access key"),
        (client(emulator, service, access_key=of_jobs, secret="SAGEMAKER"), of_secret, "not signed with"),
        (client(emulator, service), of_secret, "not signed with this emulator's secret key"),
        (client(emulator, service, signature_version=UNSIGNED), of_nothing, "signature version 4"),
    ]
    for made, code, message in wrong:
        with pytest.raises(ClientError) as refused:
            CALLS[service](made)
        assert refused.value.response["Error"]["Code"] == code
        assert message in refused.value.response["Error"]["Message"]
        assert refused.value.response["ResponseMetadata"]["HTTPStatusCode"] == 403
    with pytest.raises(ClientError, match="403"):
        client(emulator, "s3").head_object(Bucket=BUCKET, Key="foreign")


@pytest.mark.parametrize("minutes", [-6, 6])
@pytest.mark.parametrize("service, code", [("s3", "RequestTimeTooSkewed"), ("sagemaker", "InvalidSignatureException")])
def test_an_old_signature_and_one_of_the_future_are_refused(aws, monkeypatch, service, code, minutes):
    then = get_current_datetime() + timedelta(minutes=minutes)
    monkeypatch.setattr(botocore.auth, "get_current_datetime", lambda: then)
    with pytest.raises(ClientError, match="Signature expired") as refused:
        CALLS[service](aws.client(service))
    assert refused.value.response["Error"]["Code"] == code


def test_a_request_that_was_altered_after_signing_is_refused(aws):
    aws.put("whole", "whole")
    path, body = f"/{BUCKET}/altered?x=a%20b&y", b"body"
    aws.put("altered", "x")
    headers = signed(aws, "PUT", path, {"x-amz-meta-a": "1"}, body)
    assert send(aws.url, "PUT", path, headers, body)[0] == 200
    altered = {
        "body": ("PUT", path, headers, b"BODY"),
        "no body": ("PUT", path, headers, b""),
        "path": ("PUT", path.replace("altered", "whole"), headers, body),
        "query": ("PUT", path.replace("&y", "&acl"), headers, body),
        "method": ("POST", path, headers, body),
        "header": ("PUT", path, headers | {"x-amz-meta-a": "2"}, body),
        "a header more": ("PUT", path, headers | {"X-Amz-Target": "SageMaker.CreateTrainingJob"}, body),
        "hash": ("PUT", path, headers | {"X-Amz-Content-SHA256": "UNSIGNED-PAYLOAD"}, body),
        "service": ("PUT", path, headers | {"Authorization": headers["Authorization"].replace("/s3/", "/sqs/")}, body),
        "no hash": ("PUT", path, {k: v for k, v in headers.items() if k != "X-Amz-Content-SHA256"}, body),
        "no date": ("PUT", path, {k: v for k, v in headers.items() if k != "X-Amz-Date"}, body),
    }
    assert {what: send(aws.url, *request)[0] for what, request in altered.items()} == dict.fromkeys(altered, 403)
    target = {"X-Amz-Target": "SageMaker.DescribeTrainingJob", "Content-Type": "application/x-amz-json-1.1"}
    headers = signed(aws, "POST", "/", target, b'{"TrainingJobName": "x"}', "sagemaker")
    assert "not found" in send(aws.url, "POST", "/", headers, b'{"TrainingJobName": "x"}')[1]
    assert "InvalidSignature" in send(aws.url, "POST", "/", headers, b'{"TrainingJobName": "y"}')[1]
    chunked = {k: v for k, v in headers.items() if k != "Content-Length"} | {"Transfer-Encoding": "chunked"}
    connection = http.client.HTTPConnection(urlsplit(aws.url).netloc)
    connection.request("POST", "/", b"18\r\n" + b'{"TrainingJobName": "y"}' + b"\r\n0\r\n\r\n", chunked)
    assert connection.getresponse().status == 403


def test_only_its_own_host_is_served(aws):
    port = urlsplit(aws.url).port
    path = f"/{BUCKET}?list-type=2"
    for host, status in (
        (f"127.0.0.1:{port}", 200),
        (f"localhost:{port}", 200),
        (f"LOCALHOST:{port}", 200),
        (f"evil.example:{port}", 403),
        (f"{BUCKET}.localhost:{port}", 403),
        (f"localhost:{port}.evil.example", 403),
        ("localhost", 403),
        ("", 403),
        (f"s3.{REGION}.amazonaws.com", 403),
    ):
        answer = send(aws.url, "GET", path, signed(aws, "GET", path, {"Host": host}))
        assert answer[0] == status, (host, answer)
    headers = signed(aws, "GET", path) | {"Host": f"127.0.0.1:{port}"}
    assert send(aws.url, "GET", f"http://evil.example{path}", headers)[0] == 403


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "", "http://127.0.0.1"])
def test_any_origin_is_refused_and_a_preflight_too(aws, origin):
    path = f"/{BUCKET}?list-type=2"
    assert send(aws.url, "GET", path, signed(aws, "GET", path))[0] == 200
    assert send(aws.url, "GET", path, signed(aws, "GET", path) | {"Origin": origin})[0] == 403
    asked = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,x-amz-target"}
    assert send(aws.url, "OPTIONS", "/", {"Origin": origin, **asked})[0] == 403


def test_control_calls_need_the_key(aws):
    aws.put("kept", "kept")
    for path in ("/moto-api/reset", "/moto-api/data.json", "/moto-api/", "/_emulator/add_bucket", "/latest/meta-data/"):
        for method in ("GET", "POST"):
            assert send(aws.url, method, path, {"Content-Type": "text/plain"}, b"{}")[0] == 403, path
    assert aws.objects("kept") == {"": b"kept"}
    assert send(aws.url, "GET", "/moto-api/data.json", signed(aws, "GET", "/moto-api/data.json"))[0] == 200


@pytest.mark.parametrize("key", ["a b+c%20d", "ü-码/'(x)*!~", "//double//", "a/./b/../c", "a;b=c&d?e#f", "a:b@c,$"])
def test_what_boto3_sends_is_taken_whatever_its_names(aws, key, tmp_path):
    s3 = aws.client("s3")
    s3.put_object(
        Bucket=BUCKET, Key=key, Body=b"1", Metadata={"a_b": "x  y"}, Tagging="a=b%20c", ContentType="a/b; c=d"
    )
    assert s3.get_object(Bucket=BUCKET, Key=key)["Body"].read() == b"1"
    assert s3.list_objects_v2(Bucket=BUCKET, Prefix=key, Delimiter="+ &")["KeyCount"] == 1
    assert s3.copy_object(Bucket=BUCKET, Key="copy", CopySource={"Bucket": BUCKET, "Key": key})
    for algorithm in ("CRC32", "SHA256"):
        s3.put_object(Bucket=BUCKET, Key=key, Body=io.BytesIO(b"1"), ChecksumAlgorithm=algorithm)
    s3.delete_objects(Bucket=BUCKET, Delete={"Objects": [{"Key": key}, {"Key": "copy"}]})
    assert aws.objects(key) == {}


def test_a_large_file_goes_up_and_down_in_parts_and_a_body_may_be_left_unsigned(aws, emulator, tmp_path):
    data = os.urandom(9 << 20)
    (tmp_path / "file").write_bytes(data)
    aws.client("s3").upload_file(str(tmp_path / "file"), BUCKET, "large")
    assert aws.objects("large") == {"": data}
    free = client(emulator, "s3", secret=aws.credentials[1], s3={"payload_signing_enabled": False})
    free.put_object(Bucket=BUCKET, Key="unsigned body", Body=b"1")
    assert aws.objects("unsigned body") == {"": b"1"}


@pytest.mark.parametrize("version", [None, "s3v4"])
def test_a_presigned_url_serves_its_one_purpose_until_it_expires(aws, emulator, version):
    s3 = client(emulator, "s3", secret=aws.credentials[1], signature_version=version)
    given = {"Bucket": BUCKET, "Key": "pre/signed ü"}

    def url(operation: str = "get_object", seconds: int = 60, **more) -> str:
        return s3.generate_presigned_url(operation, {**given, **more}, ExpiresIn=seconds)

    def fetch(url: str, method: str = "GET", data: bytes | None = None, **headers) -> int | bytes:
        try:
            request = urllib.request.Request(url, data, headers, method=method)
            return urllib.request.urlopen(request, timeout=30).read()
        except urllib.error.HTTPError as error:
            return error.code

    assert fetch(url("put_object"), "PUT", b"whole", **{"Content-Type": ""}) == b""
    assert fetch(url()) == b"whole"
    aws.put("pre/other", "other")
    assert fetch(url().replace("signed", "other")) == 403
    assert fetch(url(), "DELETE") == 403
    assert fetch(url(), "GET", **{"X-Amz-Target": "SageMaker.ListTrainingJobs"}) == 403
    assert fetch(url(seconds=-1)) == 403
    assert fetch(url(ResponseContentType="a/b").replace("a%2Fb", "text%2Fhtml")) == 403
    form = b"Action=CreateQueue&QueueName=foreign&Version=2012-11-05"  # without a signed service moto would ask SQS
    fetch(url("put_object", ContentType=FORM), "PUT", form, **{"Content-Type": FORM})
    assert aws.client("sqs").list_queues().get("QueueUrls") is None
    wrong = client(emulator, "s3", secret="testing", signature_version=version)
    assert fetch(wrong.generate_presigned_url("get_object", given)) == 403


FORM = "application/x-www-form-urlencoded"


def test_a_job_reaches_its_services_with_a_key_that_no_file_of_it_holds(aws, emulator):
    script = f"""
    import boto3, time
    logs, until = boto3.client("logs"), time.monotonic() + 30
    while not logs.describe_log_groups()["logGroups"] and time.monotonic() < until:
        time.sleep(0.2)  # that of this job is made with its first lines
    say(
        objects=boto3.client("s3").list_objects_v2(Bucket="{BUCKET}", Prefix="of-the-job")["KeyCount"],
        status=boto3.client("sagemaker").describe_training_job(TrainingJobName="calls")["TrainingJobStatus"],
        groups=len(logs.describe_log_groups()["logGroups"]),
    )
    """
    aws.put("of-the-job/a")
    assert aws.ended(aws.start("calls", SAY + script))["TrainingJobStatus"] == "Completed", aws.log("calls")
    assert aws.said("calls") == {"objects": 1, "status": "InProgress", "groups": 1}
    secrets = [
        emulator.environment["AWS_SECRET_ACCESS_KEY"],
        emulator.jobs.services.environment["AWS_SECRET_ACCESS_KEY"],
    ]
    files = [file for file in emulator.jobs.folder.rglob("*") if file.is_file()]
    assert files and not [file for file in files if any(secret.encode() in file.read_bytes() for secret in secrets)]
    assert not any(secret in line for secret in secrets for line in aws.log("calls"))


def test_the_command_says_that_it_needs_its_key_which_is_new_at_each_start():
    show = "import os; print(os.environ['AWS_ACCESS_KEY_ID'], os.environ['AWS_SECRET_ACCESS_KEY'])"
    command = [sys.executable, "-m", "launcher", "emulate", "--", sys.executable, "-c", show]
    one, other = (subprocess.run(command, capture_output=True, text=True, timeout=120) for _ in range(2))
    assert "answers its own new key only" in one.stderr
    (key, secret), (other_key, other_secret) = one.stdout.split(), other.stdout.split()
    assert key != other_key and secret != other_secret and len(secret) == 40
    assert secret not in one.stderr


def raw(aws: Aws, request: str) -> bytes:
    """The answer to a request whose form no client would give it."""
    with socket.create_connection(urlsplit(aws.url).netloc.split(":"), timeout=30) as connection:
        connection.sendall(request.encode())
        return connection.makefile("rb").read()


def test_a_body_over_the_limit_is_refused_before_it_is_read(aws):
    for service, path in (("s3", f"/{BUCKET}/too-large"), ("sagemaker", "/"), ("sts", "/")):
        headers = signed(aws, "PUT", path, {}, b"x", service) | {"Content-Length": str(100 * 10**9)}
        status, text = send(aws.url, "PUT", path, headers, b"x")
        assert (status, "takes bodies of up to 1,073,741,824 bytes" in text) == (403, True), text
    presigned = aws.client("s3").generate_presigned_url("put_object", {"Bucket": BUCKET, "Key": "too-large"})
    path = presigned.removeprefix(aws.url)
    assert "EntityTooLarge" in send(aws.url, "PUT", path, {"Content-Length": str(router.MAX_BODY + 1)})[1]
    assert not aws.objects("too-large")


def test_a_chunked_body_over_the_limit_is_refused(aws, monkeypatch):
    monkeypatch.setattr(router, "MAX_BODY", 1000)
    headers = signed(aws, "PUT", f"/{BUCKET}/chunks", {}, b"x" * 1000)
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items() if name != "Content-Length")
    head = f"PUT /{BUCKET}/chunks HTTP/1.1\r\nHost: {urlsplit(aws.url).netloc}\r\n{lines}Transfer-Encoding: chunked\r\n\r\n"
    for chunks, answer in (
        ("3e8\r\n" + "x" * 1000 + "\r\n0\r\n\r\n", b"200"),
        ("3e9\r\n" + "x" * 1001 + "\r\n0\r\n\r\n", b"EntityTooLarge"),
        ("ZZZ\r\n", b"Invalid chunk header"),
    ):
        assert answer in raw(aws, head + chunks), chunks[:5]
    assert aws.objects("chunks") == {"": b"x" * 1000}


def test_an_address_that_is_none_is_refused_without_a_traceback(aws, capfd):
    assert b" 400 " in raw(aws, "GET http://[x/ HTTP/1.1\r\n\r\n").splitlines()[0]
    assert capfd.readouterr() == ("", "")
