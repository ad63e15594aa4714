"""The emulator is nobody's way in: neither for another user of the machine nor for a page in a browser."""

from __future__ import annotations

import http.server
import json
import os
import subprocess
import sys
import threading
from urllib.parse import urlsplit

import pytest
from botocore.exceptions import ClientError

from tests.browser import Browser
from tests.conftest import wait_until
from tests.emulator.conftest import BUCKET, NOBODY, SAY

WAITS = (
    SAY
    + """
    import time
    say(ready=True)
    time.sleep(200)
"""
)

FOREIGN = """
import encodings.idna, http.client, json, os, pathlib, sys
given = json.load(sys.stdin)
if given["user"]:
    os.setgroups([])
    os.setresgid(*[given["user"]] * 3)
    os.setresuid(*[given["user"]] * 3)
answers = []
for method, path, headers, body in given["requests"]:
    connection = http.client.HTTPConnection(given["address"])
    connection.request(method, path, body, headers)
    answers.append(connection.getresponse().status)
found = []
for file in [*pathlib.Path("/proc").glob("[0-9]*/environ"), *pathlib.Path("/proc").glob("[0-9]*/cmdline")]:
    try:
        found += [str(file)] * (given["secret"] in file.read_bytes().decode(errors="replace"))
    except OSError:
        pass
print(json.dumps([answers, found]))
"""
"""A stranger's program: requests, and a search for the key in what this machine tells of its processes."""


def forged(request: dict) -> list[list]:
    """Requests that put a source into S3 and start it as a job, as boto3 would send them, but for the signature."""
    scope = (
        "AWS4-HMAC-SHA256 Credential=testing/20260101/eu-west-1/{}/aws4_request, SignedHeaders=host, Signature="
        + "0" * 64
    )
    start = {"Authorization": scope.format("sagemaker"), "X-Amz-Target": "SageMaker.CreateTrainingJob"}
    source = f"/{BUCKET}/source/{request['TrainingJobName']}/sourcedir.tar.gz"
    return [
        ["PUT", source, {"Authorization": scope.format("s3")}, "x"],
        ["PUT", source, {}, "x"],
        ["POST", "/", {**start, "Content-Type": "application/x-amz-json-1.1"}, json.dumps(request)],
        ["POST", "/", {"X-Amz-Target": start["X-Amz-Target"]}, json.dumps(request)],
        ["POST", "/moto-api/reset", {}, ""],
    ]


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_another_user_of_this_machine_can_neither_run_code_nor_find_the_key(aws, emulator):
    aws.start("waits", WAITS)
    wait_until(lambda: any(line.startswith("said ") for line in aws.log("waits")), 60, "the job's line")

    def search(user: int, secret: str, requests: list | None = None) -> list:
        given = {"user": user, "secret": secret, "requests": requests or [], "address": urlsplit(emulator.url).netloc}
        done = subprocess.run(
            [sys.executable, "-c", FOREIGN], input=json.dumps(given), capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    of_job = emulator.jobs.services.environment["AWS_SECRET_ACCESS_KEY"]
    assert search(0, of_job)[1], "the job's processes have SageMaker's key"
    request = aws.request("foreign", WAITS)
    answers, found = search(NOBODY, of_job, forged(request))
    assert (answers, found) == ([403] * 5, [])
    assert search(NOBODY, emulator.environment["AWS_SECRET_ACCESS_KEY"]) == [[], []]
    with pytest.raises(ClientError, match="not found"):
        aws.describe("foreign")
    assert aws.objects("source/foreign/")["sourcedir.tar.gz"] != b"x"
    aws.client("sagemaker").stop_training_job(TrainingJobName="waits")
    assert aws.ended("waits")["TrainingJobStatus"] == "Stopped"


class Quiet(http.server.BaseHTTPRequestHandler):
    """An empty page, for any address."""

    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.end_headers()

    def log_message(self, *_):
        return


@pytest.fixture
def page():
    """The address of a page of somebody else's, on this machine."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Quiet)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    thread.join()
    server.server_close()


TRY = """
(async () => {
    const answers = [];
    for (const [method, path, headers, body] of %s) for (const mode of ["cors", "no-cors"]) {
        try {
            const plain = mode === "no-cors";
            const answer = await fetch("%s" + path, {
                mode, method: plain && method === "PUT" ? "POST" : method, headers: plain ? {} : headers, body,
            });
            answers.push(answer.type === "opaque" ? "opaque" : answer.status);
        } catch (error) {
            answers.push("no answer");
        }
    }
    return answers;
})()
"""
"""Each request as a page sends it that wants to read the answer, and as one that does not."""


def test_a_page_in_a_browser_can_do_nothing_not_even_after_dns_rebinding(aws, page, tmp_path):
    request = aws.request("of-a-page", WAITS)
    port = urlsplit(aws.url).port
    rebound = f"http://rebound.example:{port}"
    with Browser(tmp_path, flags=["--host-resolver-rules=MAP rebound.example 127.0.0.1"]) as browser:
        browser.navigate(page)
        answers = browser.value(TRY % (json.dumps(forged(request)), aws.url))
        assert answers == ["no answer", "opaque"] * 5
        browser.navigate(rebound)  # whose name has just come to mean this machine: the page's origin is the emulator's
        assert browser.value("location.origin") == rebound
        assert "serves no other host" in browser.value("document.documentElement.textContent")
        assert browser.value(TRY % (json.dumps(forged(request)), rebound)) == [403] * 10
        assert browser.value("fetch('/moto-api/data.json').then(answer => answer.status)") == 403
    with pytest.raises(ClientError, match="not found"):
        aws.describe("of-a-page")
    assert aws.objects("source/of-a-page/")["sourcedir.tar.gz"] != b"x"
