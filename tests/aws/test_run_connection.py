"""Runs on SageMaker while AWS does not answer, throttles, or denies a part; and runs that another process follows too."""

from __future__ import annotations

import errno
import io
import sys
import threading
from types import SimpleNamespace

import boto3
import boto3.exceptions
import botocore.exceptions
import pytest
import urllib3
from botocore.awsrequest import AWSPreparedRequest, AWSResponse
from botocore.httpsession import URLLib3Session

import launcher
from launcher.aws import follow, session
from launcher.commands import live, main
from launcher.record import records
from launcher.runner import run as running
from tests.aws.conftest import REGION, SLEEPS, TRAINS, is_ready, started
from tests.conftest import wait_until


def test_expired_credentials_and_throttling_do_not_lose_the_run(sagemaker_job, aws_calls):
    run = started(sagemaker_job(SLEEPS))
    wait_until(lambda: is_ready(run), 60, "the script's line")
    aws_calls.fail("DescribeTrainingJob", code="ExpiredTokenException", times=1)
    wait_until(lambda: run.state and run.trouble, what="trouble")
    assert "expired" in run.trouble and "aws sso login" in run.trouble
    assert run.folder.state() == "InProgress"
    wait_until(lambda: run.state and not run.trouble, what="an answer")
    aws_calls.fail("DescribeTrainingJob", code="ThrottlingException", times=2)
    run.stop("a test")
    assert run.wait(60) == "Stopped"


def test_a_throttled_start_is_tried_again_and_starts_one_job(sagemaker_job, emulator, aws_calls):
    """https://github.com/aws/sagemaker-python-sdk/issues/645"""
    aws_calls.fail("CreateTrainingJob", code="ThrottlingException", times=2)
    run = started(sagemaker_job("print('started')\n"))
    assert run.wait(120) == "Completed"
    assert [name for _, name in emulator.jobs.jobs if name.startswith(run.name)] == [run.name]


def test_a_job_that_sagemaker_does_not_know_any_more_is_over(sagemaker_job, aws_calls, monkeypatch):
    run = started(sagemaker_job(SLEEPS))
    wait_until(lambda: is_ready(run), 60, "the script's line")
    aws_calls.fail("DescribeTrainingJob", code="ValidationException", times=1, message="Requested resource not found.")
    monkeypatch.setattr(follow, "UNKNOWN_SECONDS", 0)
    wait_until(lambda: run.state == "Failed", 30, "the end")
    assert "has no such job" in run.outcome()["failure"]
    boto3.client("sagemaker", region_name=REGION).stop_training_job(TrainingJobName=run.name)


def test_without_the_right_to_read_logs_a_run_is_still_followed_to_its_end(sagemaker_job, data, aws_calls, capsys):
    aws_calls.fail("DescribeLogStreams", code="AccessDeniedException", times=1000, message="not authorized: logs")
    run = started(sagemaker_job(TRAINS, inputs={"train": {"folder": str(data)}}))
    assert run.wait(120) == "Completed"
    assert any("logs: not allowed" in text for text in run.outcome()["not_saved"])
    live._News(run).show(live._PlainLines(run))
    assert "logs: not allowed" in capsys.readouterr().err
    assert main.main(["logs", run.name]) == 0
    assert "logs: not allowed" in capsys.readouterr().err
    assert run.result() == {"validation_accuracy": 0.9}


def test_without_the_right_to_describe_it_a_run_is_not_followed_for_ever(sagemaker_job, aws_calls, monkeypatch, capsys):
    """As in CI, where nobody sees the trouble. In a terminal somebody does."""
    run = started(sagemaker_job(SLEEPS))
    wait_until(lambda: is_ready(run), 60, "the script's line")
    denied = {"code": "AccessDeniedException", "message": "not authorized to perform: sagemaker:DescribeTrainingJob"}
    aws_calls.fail("DescribeTrainingJob", **denied)
    wait_until(lambda: run.state and run.denied_since is not None, what="a refusal")
    live._end_if_denied(run)  # not at once
    monkeypatch.setattr(live, "DENIED_SECONDS", 0.0)
    with monkeypatch.context() as terminal:
        for stream in (sys.stdin, sys.stdout):
            terminal.setattr(stream, "isatty", lambda: True)
        live._end_if_denied(run)
    aws_calls.fail("DescribeTrainingJob", **denied)
    assert main.main(["attach", run.name]) == 2
    reported = capsys.readouterr().err
    assert f"{run.name} goes on, and is not followed any longer" in reported and denied["message"] in reported
    assert f"launcher attach {run.name} follows it; launcher stop {run.name} stops it" in reported
    run.stop()
    assert run.wait(60) == "Stopped" and run.denied_since is None


def test_the_record_can_be_read_while_aws_does_not_answer(sagemaker_job, monkeypatch, emulator):
    run = started(sagemaker_job(SLEEPS))
    wait_until(lambda: is_ready(run), 60, "the script's line")
    monkeypatch.setattr(session, "MAX_ATTEMPTS", 1)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    session.forget_clients()
    offline = launcher.attach(run.name)
    assert offline.state == "InProgress"
    assert "cannot be reached" in offline.trouble
    assert "ready" in [line for _, line in offline.logs()]
    with pytest.raises(launcher.UserError, match="cannot be reached"):
        offline.stop()
    monkeypatch.setenv("AWS_ENDPOINT_URL", emulator.url)
    session.forget_clients()
    offline.stop()
    assert offline.wait(60) == "Stopped"


def test_the_clients_of_an_account_share_a_session_until_its_credentials_are_renewed(connected, monkeypatch):
    made, new = [], session.boto_session
    monkeypatch.setattr(session, "boto_session", lambda region: made.append(region) or new(region))
    assert len({id(session.client(service, REGION)) for service in ("sts", "s3", "sts", "iam")}) == 3
    assert made == [REGION]
    session.forget_clients()
    session.client("sts", REGION)
    assert made == [REGION, REGION]


@pytest.mark.slow
def test_two_followers_of_one_run_write_each_line_once(sagemaker_job):
    text = "import time\nfor number in range(60):\n    print(f'line {number}', flush=True)\n    time.sleep(0.1)\n"
    run = started(sagemaker_job(text))
    other = launcher.attach(run.name)
    watching = threading.Thread(target=other.wait, args=(120,))
    watching.start()
    assert run.wait(120) == "Completed"
    watching.join()
    numbers = [int(line.split()[1]) for _, line in run.logs() if line.startswith("line ")]
    assert numbers == list(range(60))


GOES_ON_LATER = """
    import time
    while not pathlib.Path(os.environ["GO"]).exists():
        time.sleep(0.1)
"""


def test_lines_that_a_crash_left_half_recorded_are_not_doubled(sagemaker_job, data, tmp_path):
    go = tmp_path / "go"
    channel = {"train": {"folder": str(data)}}
    run = started(sagemaker_job(TRAINS + GOES_ON_LATER, inputs=channel, environment={"GO": str(go)}))
    wait_until(
        lambda: run.state and run.folder.log("algo-1").exists() and run.folder.log("algo-1").stat().st_size,
        90,
        "a line",
    )
    with open(run.folder.log("algo-1"), "ab") as log:
        log.write(b"written before the power failed, and not noted in streams.json\n")
    go.touch()
    assert run.wait(120) == "Completed"
    text = run.folder.log("algo-1").read_text()
    assert "power" not in text
    assert text.count("epoch 1/2 step 5/10") == 1


def test_log_pages_without_lines_are_not_the_end():
    """https://docs.aws.amazon.com/AmazonCloudWatchLogs/latest/APIReference/API_GetLogEvents.html: only an equal token is."""
    pages = {None: ("1", ["a"]), "1": ("2", []), "2": ("3", ["b"]), "3": ("3", [])}

    class Wire:
        def get_log_events(self, **options):
            token, lines = pages[options.get("nextToken")]
            return {"nextForwardToken": token, "events": [{"message": line} for line in lines]}

    assert [line for _, lines in follow._events(Wire(), "stream", None) for line in lines] == ["a", "b"]


def expired(**options):
    """GetLogEvents of two hosts: algo-1 refuses the tokens of an earlier day."""
    pages = {"run/algo-1-1": ["one", "two"], "run/algo-2-1": ["three"]}
    stream, token = options["logStreamName"], options.get("nextToken")
    if token == "f/old" and stream == "run/algo-1-1":
        answer = {"Error": {"Code": "InvalidParameterException", "Message": "The specified nextToken is invalid."}}
        raise botocore.exceptions.ClientError(answer, "GetLogEvents")
    lines = pages[stream] if token is None or token == "f/old" else []
    return {"nextForwardToken": "f/new", "events": [{"message": line} for line in lines]}


def denied(**options):
    if options["logStreamName"] == "run/algo-1-1":
        answer = {"Error": {"Code": "AccessDeniedException", "Message": "logs:GetLogEvents"}}
        raise botocore.exceptions.ClientError(answer, "GetLogEvents")
    return expired(**options)


@pytest.fixture
def followed(tmp_path, monkeypatch):
    """A folder of a run of two hosts that was followed a day ago, and what reads its logs from CloudWatch."""
    folder = records.RunFolder(tmp_path / "run")
    (folder.path / "logs").mkdir(parents=True)
    folder.log("algo-1").write_text("one\n")
    folder.log("algo-2").write_text("")
    positions = {"sizes": {"algo-1": 4, "algo-2": 0}, "tokens": {"run/algo-1-1": "f/old", "run/algo-2-1": "f/old"}}
    records.write_json(folder.path / "logs/streams.json", positions)
    streams = [{"logStreamName": name} for name in positions["tokens"]]
    paginator = SimpleNamespace(paginate=lambda **_: [{"logStreams": streams}])

    def fetch(get_log_events):
        wire = SimpleNamespace(get_log_events=get_log_events, get_paginator=lambda _: paginator)
        monkeypatch.setattr(session, "client", lambda service, region: wire)
        found = follow.fetch_logs(folder, REGION, 2)
        return found, [folder.log(host).read_text() for host in ("algo-1", "algo-2")]

    return fetch


def test_a_position_in_a_log_that_has_expired_is_found_again_and_every_line_comes_once(followed):
    """`The token expires after 24 hours`: nextForwardToken in CloudWatch Logs' service model."""
    assert followed(expired) == ((True, ""), ["one\ntwo\n", "three\n"])
    assert followed(expired) == ((False, ""), ["one\ntwo\n", "three\n"])


def test_a_log_that_cannot_be_read_does_not_silence_the_other_hosts(followed):
    (new, no_logs), logs = followed(denied)
    assert new and logs == ["one\n", "three\n"]
    assert no_logs == "logs of algo-1: not allowed: logs:GetLogEvents"


def test_a_log_that_is_refused_from_its_first_line_too_is_asked_for_twice(followed):
    asked = []

    def refused(**options):
        asked.append(options.get("nextToken"))
        answer = {"Error": {"Code": "InvalidParameterException", "Message": "no"}}
        raise botocore.exceptions.ClientError(answer, "GetLogEvents")

    (new, no_logs), _ = followed(refused)
    assert asked == ["f/old", None] * 2 and not new
    assert no_logs.startswith("logs of algo-1: InvalidParameterException") and no_logs.endswith(", and 1 more host")


def test_a_known_name_needs_no_region_and_a_broken_adoption_can_be_repeated(sagemaker_job, data):
    run = started(sagemaker_job(TRAINS, inputs={"train": {"folder": str(data)}}))
    assert launcher.attach("test", region="eu-west-1").name == run.name
    assert run.wait(120) == "Completed"
    (running.records.store() / "half").mkdir()
    with pytest.raises(launcher.UserError, match="no such training job"):
        launcher.attach("half", region=REGION)


@pytest.mark.parametrize("name", session.ACCOUNT_VARIABLES)
def test_where_the_environment_names_another_account_another_client_is_asked(name, monkeypatch, tmp_path):
    """As in a notebook: an emulator that was closed and started again has another port."""
    (tmp_path / "config").write_text("[profile http://127.0.0.1:1]\nregion = eu-west-1\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    first = session.client("s3", REGION)
    assert session.client("s3", REGION) is first
    monkeypatch.setenv(name, "http://127.0.0.1:1")
    if name == "AWS_ACCESS_KEY_ID":
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "testing")
    assert session.client("s3", REGION) is not first
    session.forget_clients()


@pytest.mark.parametrize("name", [*session.NETWORK, *session.SIGN_IN, *session.NO_CREDENTIALS])
def test_whatever_keeps_aws_from_answering_has_words_and_is_asked_again(name):
    """botocore's HTTPClientError and its kind have an attribute `response`, which is None."""
    made = getattr(botocore.exceptions, name, None) or getattr(boto3.exceptions, name)
    words = {
        "error": "reset",
        "endpoint_url": "https://sagemaker",
        "proxy_url": "p",
        "provider": "sso",
        "error_msg": "no",
        "cred_var": "a key",
        "actual_bytes": 1,
        "expected_bytes": 2,
    }
    error = made(**words) if issubclass(made, botocore.exceptions.BotoCoreError) else made(ConnectionError("reset"))
    assert session.is_transient(error) and not session.is_unknown_job(error)
    found, fix = session.about(error)
    assert found and fix


class Refusing:
    """HTTP answers of S3 to the HEAD request of a model, and of STS about the caller. botocore reads them."""

    def __init__(self) -> None:
        self.head: int | None = None
        """The HTTP status for a HEAD request, whose answer has no body; None: the emulator answers."""
        self.identity: tuple[str, str] | None = None
        """The code and message of STS; None: the emulator answers."""

    def answer(self, request: AWSPreparedRequest) -> AWSResponse | None:
        """The answer to a request of this process; None: the emulator's."""
        if request.method == "HEAD" and request.url.endswith("/output/model.tar.gz") and self.head:
            return self._made(request, self.head, b"")
        if "GetCallerIdentity" in str(request.body) and self.identity:
            error = "<Error><Type>Sender</Type><Code>{}</Code><Message>{}</Message></Error>".format(*self.identity)
            return self._made(request, 403, f"<ErrorResponse>{error}</ErrorResponse>".encode())
        return None

    @staticmethod
    def _made(request: AWSPreparedRequest, status: int, body: bytes) -> AWSResponse:
        raw = urllib3.HTTPResponse(io.BytesIO(body), status=status, preload_content=False)
        return AWSResponse(request.url, status, raw.headers, raw)


@pytest.fixture
def refusing(monkeypatch) -> Refusing:
    made, send = Refusing(), URLLib3Session.send
    monkeypatch.setattr(URLLib3Session, "send", lambda self, request: made.answer(request) or send(self, request))
    return made


@pytest.mark.parametrize(
    ("status", "code", "message", "words"),
    [
        (400, "ExpiredToken", "The security token included in the request is expired", "credentials have expired"),
        (403, "InvalidClientTokenId", "The security token included in the request is invalid.", "rejects these"),
        (403, "SignatureDoesNotMatch", "Signature expired: 20261129T000000Z is now earlier", "clock is wrong"),
    ],
)
def test_credentials_that_fail_during_the_download_do_not_lose_the_results(
    sagemaker_job, done_at_once, refusing, status, code, message, words
):
    """S3 answers the HEAD request, with which a download begins, without a body: a bare 400 or 403."""
    run = started(sagemaker_job("print(1)\n"))
    refusing.head, refusing.identity = status, (code, message)
    wait_until(lambda: run.state == "Completed" or run.trouble, 120, "trouble")
    assert words in run.trouble and not run.folder.outcome.exists()
    refusing.head = refusing.identity = None
    assert run.wait(120) == "Completed"
    assert run.folder.model.is_file() and "not_saved" not in run.outcome()


@pytest.mark.parametrize(
    ("status", "why"),
    [(400, "AWS gives no reason (Bad Request), as with expired credentials"), (403, "not allowed: Forbidden")],
)
def test_a_model_that_valid_credentials_may_not_fetch_ends_the_following(
    sagemaker_job, done_at_once, refusing, status, why
):
    run = started(sagemaker_job("print(1)\n"))
    refusing.head = status
    assert run.wait(120) == "Completed" and not run.folder.model.exists()
    [not_saved] = run.outcome()["not_saved"]
    assert not_saved.startswith(f"model.tar.gz: {why}; it is in s3://")


def test_a_wrong_clock_is_asked_again():
    answer = {"Error": {"Code": "RequestTimeTooSkewed", "Message": "The difference is too large."}}
    error = botocore.exceptions.ClientError(answer, "GetObject")
    assert session.is_transient(error) and "clock is wrong" in session.about(error)[0]


@pytest.mark.parametrize("error", [PermissionError(errno.EACCES, "no"), OSError(errno.EROFS, "no")])
def test_a_colleagues_run_is_shown_as_its_owner_last_saw_it(sagemaker_job, monkeypatch, error):
    run = started(sagemaker_job(SLEEPS))
    wait_until(lambda: is_ready(run), 60, "the script's line")

    def closed(*_):
        raise error

    with monkeypatch.context() as others:
        others.setattr(follow, "open", closed, raising=False)
        assert launcher.attach(run.name).state == "InProgress" and len(launcher.runs()) == 1
    run.stop()
    assert run.wait(60) == "Stopped"
