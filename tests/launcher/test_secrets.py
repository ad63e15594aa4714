"""Secrets of the environment: the script gets them, and nothing else holds or prints them."""

from __future__ import annotations

import pytest

import launcher
from launcher.commands import main
from launcher.config import redaction, secret_shapes, yaml_file
from launcher.config.loading import from_values, load

VALUE = "hunter2-" + "x" * 20


def kept_in(run: launcher.Run) -> list[str]:
    files = [path for path in run.folder.path.rglob("*") if path.is_file() and "code" not in path.parts]
    assert len(files) > 10
    return [str(path) for path in files if VALUE.encode() in path.read_bytes()]


def test_a_secret_of_the_environment_reaches_the_script_and_no_file_and_a_replay_takes_it_anew(script_job, monkeypatch):
    text = "import os; raise SystemExit(0 if len(os.environ['MY_SETTING']) == 28 else 9)"
    monkeypatch.setenv("MY_SETTING", VALUE)
    plan = launcher.plan(script_job(text, secrets={"MY_SETTING": "env"}))
    assert "secret      MY_SETTING: from the environment" in str(plan)
    assert VALUE not in str(plan) + plan.to_json() + plan._repr_html_()
    run = launcher.run(plan)
    assert run.wait(60) == "Completed" and kept_in(run) == []
    again = launcher.run(launcher.replay(run.name))
    assert again.wait(60) == "Completed" and kept_in(again) == []
    monkeypatch.delenv("MY_SETTING")
    [issue] = launcher.replay(run.name).errors
    assert issue.key == "secrets.MY_SETTING" and "export MY_SETTING" in issue.fix


def test_a_secret_that_is_gone_when_the_run_starts_is_named(script_job, monkeypatch):
    monkeypatch.setenv("MY_SETTING", VALUE)
    plan = launcher.plan(script_job("x = 1", secrets={"MY_SETTING": "env"}))
    monkeypatch.delenv("MY_SETTING")
    with pytest.raises(launcher.UserError, match="secrets.MY_SETTING: not set in this environment"):
        launcher.run(plan)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"secrets": {"A=B": "env"}}, "secrets.A=B: not a valid variable name"),
        ({"secrets": {"SM_TOKEN": "env"}}, "secrets.SM_TOKEN: set by the container toolkit"),
        ({"secrets": {"HOME": "env"}}, "secrets.HOME: set by the container toolkit"),
        ({"secrets": {"A": "env"}, "environment": {"A": "1"}}, "secrets.A: also under environment"),
    ],
)
def test_names_that_no_secret_can_have_are_refused(script_job, values, expected):
    job = script_job("x = 1", **values)
    assert expected in "\n".join(map(str, launcher.plan(job).errors))


def test_a_value_in_place_of_a_source_is_refused_and_not_printed():
    for value in (VALUE, {"env": VALUE, "secretsmanager": None}, [VALUE], {"secretsmanager": [VALUE]}):
        with pytest.raises(launcher.UserError) as refused:
            from_values({"name": "a", "script": "b.py", "secrets": {"A": value}})
        assert "secrets.A" in str(refused.value) and VALUE not in str(refused.value)


# -- names and values that seem to be secrets --------------------------------------------------------------------------

USUAL = [
    "AWS_ACCESS_KEY_ID",
    "AWS_SECRET_ACCESS_KEY",
    "AWS_SESSION_TOKEN",
    "HF_TOKEN",
    "HUGGING_FACE_HUB_TOKEN",
    "HUGGINGFACEHUB_API_TOKEN",
    "WANDB_API_KEY",
    "OPENAI_API_KEY",
    "ANTHROPIC_API_KEY",
    "GITHUB_TOKEN",
    "GH_TOKEN",
    "GITHUB_PAT",
    "GITLAB_TOKEN",
    "CI_JOB_TOKEN",
    "NPM_TOKEN",
    "TWINE_PASSWORD",
    "PGPASSWORD",
    "POETRY_PYPI_TOKEN_PYPI",
    "MYSQL_PWD",
    "MYSQL_ROOT_PASSWORD",
    "SENTRY_DSN",
    "SLACK_BOT_TOKEN",
    "SLACK_WEBHOOK_URL",
    "STRIPE_SECRET_KEY",
    "TWILIO_AUTH_TOKEN",
    "AZURE_CLIENT_SECRET",
    "AZURE_STORAGE_CONNECTION_STRING",
    "AZURE_STORAGE_KEY",
    "GOOGLE_APPLICATION_CREDENTIALS",
    "GCP_SA_KEY",
    "DOCKER_AUTH_CONFIG",
    "KAGGLE_KEY",
    "NEPTUNE_API_TOKEN",
    "COMET_API_KEY",
    "MLFLOW_TRACKING_PASSWORD",
    "CLEARML_API_SECRET_KEY",
    "NGC_API_KEY",
    "JWT_SECRET",
    "SMTP_PASS",
    "ENCRYPTION_KEY",
    "SSH_PRIVATE_KEY",
    "SNOWFLAKE_PASSWORD",
    "RABBITMQ_DEFAULT_PASS",
    "NEW_RELIC_LICENSE_KEY",
    "apiKey",
    "clientSecret",
    "OPENAI_API_KEY_PROD",
    "AUTHORIZATION",
    "AUTH_HEADER",
    "BEARER",
    "COOKIES",
    "JDBC_URL",
    "CONNECTION_STRING_PROD",
    "GITHUB_TOKEN_RO",
    "TOKEN1",
]

WITH_PASSWORDS = (
    "REDIS_URL",
    "MONGO_URI",
    "MONGODB_URI",
    "DATABASE_URL",
    "SQLALCHEMY_DATABASE_URI",
    "PIP_EXTRA_INDEX_URL",
    "PIP_INDEX_URL",
    "UV_INDEX_URL",
    "CELERY_BROKER_URL",
)
"""Names of addresses, which hold a secret where there is a password in them."""

HARMLESS = [
    "PATH",
    "HOME",
    "PWD",
    "OLDPWD",
    "NCCL_DEBUG",
    "OMP_NUM_THREADS",
    "TOKENIZERS_PARALLELISM",
    "SSH_AUTH_SOCK",
    "MASTER_PORT",
    "PATIENCE",
    "PATCH_SIZE",
    "AUTHOR",
    "KEYBOARD",
    "MONKEY",
    "COMPASS",
    "num_tokens",
    "token_size",
    "token_dropout",
    "cls_token_2",
    "key_frames",
    "class_token",
    "cls_token",
    "max_token",
    "mask_token",
    "passes",
    "keypoints",
    "HF_HOME",
    "WANDB_PROJECT",
    "MLFLOW_TRACKING_URI",
    "AWS_ENDPOINT_URL",
    "S3_ENDPOINT_URL",
    "HTTP_PROXY",
    "CUDA_VISIBLE_DEVICES",
    "PYTHONPATH",
    "query_key_value",
    "monkey_patch",
    "secretary",
    "low_pass",
    "first_pass",
    "image_token",
    "sos_token",
    "db_key",
    "host_key",
    "cookie",
]


def test_the_usual_names_of_secrets_are_known_and_harmless_ones_pass():
    assert [name for name in USUAL if not secret_shapes.names_a_secret(name)] == []
    assert [name for name in HARMLESS if secret_shapes.names_a_secret(name)] == []
    for name in WITH_PASSWORDS:
        assert redaction.is_secret(name, "https://user:correcthorse@example.com/simple")
        assert not redaction.is_secret(name, "https://example.com/simple")


def test_what_seems_to_be_a_secret_is_in_no_printout_and_a_warning_says_how_to_declare_it(script_job):
    url = f"https://user:{VALUE}@pypi.example.com/simple"
    environment = {"PGPASSWORD": VALUE, "MY_INDEX": url, "PROXY": "http://proxy:8080", "PLAIN": "shown"}
    job = script_job("x = 1", environment=environment)
    plan = launcher.plan(job)
    texts = [plan.text("env"), plan.to_json(), plan._repr_html_(), job._repr_html_()]
    assert all(VALUE not in text and "http://proxy:8080" in text for text in texts)
    warned = {issue.key: issue.fix for issue in plan.issues if issue.level == "warning"}
    assert warned.keys() == {"environment.PGPASSWORD", "environment.MY_INDEX"}
    assert "secrets: {PGPASSWORD: env}" in warned["environment.PGPASSWORD"]


@pytest.mark.parametrize(
    "hyperparameters",
    [
        {"api_key": VALUE},
        {"api_key": 1234567890},
        {"tracker": {"api_key": VALUE}},
        {"trackers": [{"name": "a", "password": VALUE}]},
        {"tracking": f"https://user:{VALUE}@mlflow.example.com"},
    ],
)
def test_secret_hyperparameters_are_refused_at_any_depth_and_not_printed(script_job, hyperparameters):
    job = script_job("x = 1", hyperparameters=hyperparameters)
    plan = launcher.plan(job)
    [issue] = plan.errors
    assert "looks like a secret" in issue.found and "under secrets" in issue.fix
    for text in (str(plan), plan.to_json(), plan._repr_html_(), job._repr_html_(), str(issue)):
        assert VALUE not in text and "1234567890" not in text


@pytest.mark.parametrize(
    ("values", "key"),
    [
        ({"tags": {"api_token": VALUE}}, "tags.api_token"),
        ({"tags": {"team": "hf_" + "aBcDeFgH" * 4 + "iJ"}}, "tags.team"),
        ({"custom_mpi_options": f"-x DB_PASSWORD={VALUE}"}, "custom_mpi_options"),
        ({"debugger": {"hook_parameters": {"api_key": VALUE}}}, "debugger.hook_parameters"),
        ({"metrics": {"loss": f"https://user:{VALUE}@host/([0-9.]+)"}}, "metrics.loss"),
    ],
)
def test_a_secret_under_any_other_key_is_refused_and_not_printed(script_job, values, key):
    job = script_job("x = 1", **values)
    plan = launcher.plan(job)
    [issue] = [issue for issue in plan.errors if "looks like a secret" in issue.found]
    assert issue.key == key and "under secrets" in issue.fix
    for text in (str(plan), plan.to_json(), plan._repr_html_(), job._repr_html_()):
        assert VALUE not in text and "aBcDeFgH" not in text


def test_names_of_metrics_tags_and_options_without_a_secret_stay(script_job):
    values = {
        "metrics": {"token": "num_token=([0-9.]+)", "loss": "val_token=([0-9.]+)"},
        "tags": {"team": "vision"},
        "custom_mpi_options": "-x HF_TOKEN -x API_KEY=$API_KEY -x NCCL_DEBUG=VERSION",
        "hyperparameters": {"num_tokens": 8192, "key_frames": "all", "token_dropout": "0.1"},
    }
    job = script_job("x = 1", **values)
    assert [str(issue) for issue in launcher.plan(job).errors if "secret" in issue.found] == []
    assert "***" not in str(job.redacted())


@pytest.mark.parametrize(
    "secret",
    [
        {"secretsmanager": "team\nlines"},
        {"secretsmanager": "a", "key": "b\nc"},
        {"secretsmanager": "a", "key": "b\u2028"},
    ],
)
def test_a_secrets_name_or_field_that_breaks_a_line_is_refused(secret):
    with pytest.raises(launcher.UserError, match=r"secrets\.A\.(secretsmanager|key)"):
        from_values({"name": "a", "script": "b.py", "secrets": {"A": secret}})


@pytest.mark.parametrize(
    "text",
    [
        "tags: [{Key: password, Value: hunter2}]",
        "inputs: {train: 'password=hunter2'}",
        "secrets:\n  B: env\n  A: x: hunter2\n",
        "environment:\n  DB_PASSWORD: >\n    a\n  hunter2: b: c",
        "environment: {DB_PASSWORD: 123456789}",
        "environment:\n  DB_PASSWORD: [hunter2]",
        "environment: {DB_PASSWORD: {hunter2: 1}}",
        "environment: [hunter2]",
        "environment: hunter2",
        "environment: {DB_PASSWORD: 'hunter2}",
        "compute: {password: hunter2}",
        "inputs: {train: 'https://user:hunter2@host/data'}",
        "output: 'https://user:hunter2@host/data'",
        "hyperparameters: [{api_key: hunter2}]",
        "secrets: [hunter2]",
        "secrets: {A: hunter2}",
    ],
)
def test_a_mistake_never_prints_the_value_of_a_secret(tmp_path, text):
    (tmp_path / "job.yaml").write_text(f"name: a\nscript: b.py\n{text}\n")
    with pytest.raises(launcher.UserError) as refused:
        load(tmp_path / "job.yaml")
    assert "hunter2" not in str(refused.value) and "123456789" not in str(refused.value)


@pytest.mark.parametrize(
    "override",
    [
        "environment.DB_PASSWORD={hunter2",
        "secrets.A='hunter2",
        "secrets={A: 'hunter2",
        "environment.DB_PASSWORD.b=1",
        "environment.DB_PASSWORD: hunter2",
        "environment.DB_PASSWORD hunter2",
        "secrets.A: hunter2",
        "hyperparameters={api_key: hunter2",
    ],
)
def test_a_wrong_override_never_prints_the_value_of_a_secret(override):
    config = yaml_file.Config("job.yaml", {"environment": {"DB_PASSWORD": "hunter2"}})
    [problem] = yaml_file.override(config, [override])[1]
    assert "hunter2" not in str(problem)


def test_an_unknown_option_is_named_without_its_value(capsys):
    for words in (["--password=hunter2"], ["--password", "hunter2"], ["a=1", "--password", "hunter2", "b=2"]):
        with pytest.raises(SystemExit):
            main.read(["plan", "job.yaml", *words])
    said = capsys.readouterr().err
    assert said.count("unrecognized arguments: --password") == 3 and "hunter2" not in said


@pytest.mark.parametrize("words", [[], ["--json"], ["environment", "api_token"], ["environment", "--json"]])
def test_explain_prints_no_secret_that_a_config_holds(tmp_path, capsys, words):
    (tmp_path / "train.py").write_text(
        "import argparse\nparser = argparse.ArgumentParser()\nparser.add_argument('--api_token')\n"
        "parser.add_argument('--epochs', type=int)\nparser.parse_args()\n"
    )
    config = tmp_path / "job.yaml"
    config.write_text(
        f"name: x\nscript: train.py\nsource: {tmp_path}\nmetrics: null\nenvironment: {{HF_TOKEN: hf_{VALUE}, PLAIN: seen}}\n"
        f"hyperparameters: {{api_token: {VALUE}, epochs: 3}}\n"
    )
    assert main.main(["explain", str(config), *words]) == 0
    said = capsys.readouterr().out
    assert VALUE not in said and redaction.REDACTED in said and "seen" in said
