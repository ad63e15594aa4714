"""Defaults of one's own: which value applies, where a plan says that it comes from, and what a file of defaults may not hold."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

import launcher
from launcher import emulator
from launcher.backends.plans import plan_config
from launcher.commands import main
from launcher.config import defaults
from tests.conftest import ROOT
from tests.docs.documents import the_block

MINE = """
role: arn:aws:iam::111122223333:role/Mine
region: eu-central-1
output: s3://acme-runs/vision
image: {framework_version: "2.6.0", python: py312}
tags: {team: vision, stage: dev}
profiles:
  production:
    region: us-east-1
    network: {subnets: [subnet-0a1b2c3d], security_groups: [sg-0a1b2c3d]}
"""

SCRIPT = "print('done')\n"


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    """An empty project with a script, outside of every repository, and the user's own defaults."""
    folder = tmp_path / "project"
    (folder / "code").mkdir(parents=True)
    (folder / "code/train.py").write_text(SCRIPT)
    monkeypatch.chdir(folder)
    write(defaults.user_file(), MINE)
    return folder


def write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def config(**values) -> Path:
    file = Path("job.yaml")
    file.write_text(yaml.safe_dump({"name": "mine", "script": "train.py", "source": "code", **values}))
    return file


def typed(capsys, *words: str) -> tuple[int, str, str]:
    code = main.main([*words])
    return code, *capsys.readouterr()


def test_a_config_without_a_key_of_aws_plans_for_sagemaker_by_the_users_defaults(here):
    plan = launcher.plan(launcher.load(config(compute={"instance_type": "ml.m5.xlarge"})), on="aws")
    assert plan.errors == ()
    assert plan.request["RoleArn"] == "arn:aws:iam::111122223333:role/Mine"
    assert plan.request["OutputDataConfig"]["S3OutputPath"] == "s3://acme-runs/vision"
    assert ".eu-central-1." in plan.request["AlgorithmSpecification"]["TrainingImage"]
    assert plan.request["Tags"] == [{"Key": "stage", "Value": "dev"}, {"Key": "team", "Value": "vision"}]


def test_the_plan_says_where_each_default_comes_from(here):
    write(here / defaults.PROJECT_FILE, "# ours\ntags: {project: kt}\n")
    plan = launcher.plan(launcher.load(config(), ["profile=production"]), on="aws")
    mine = str(defaults.user_file())
    assert plan.to_dict()["defaults"] == {
        "image": f"{mine} (line 5)",
        "network.security_groups": f"{mine}, profile production (line 10)",
        "network.subnets": f"{mine}, profile production (line 10)",
        "output": f"{mine} (line 4)",
        "region": f"{mine}, profile production (line 9)",
        "role": f"{mine} (line 2)",
        "tags.project": "launcher-defaults.yaml (line 2)",
        "tags.stage": f"{mine} (line 6)",
        "tags.team": f"{mine} (line 6)",
    }
    lines = [line for line in str(plan).splitlines() if line.startswith("  defaults")]
    assert lines == [
        f"  defaults    image, output, role, tags.stage and tags.team from {mine}",
        f"  defaults    network.security_groups, network.subnets and region from {mine}, profile production",
        "  defaults    tags.project from launcher-defaults.yaml",
    ]
    assert lines[-1].split("    ", 1)[1] in plan._repr_html_()


def test_the_nearest_value_applies(here):
    """Config before profile before project before user; mappings key by key, an image as a whole."""
    write(
        here / defaults.PROJECT_FILE, "region: eu-west-1\ntags: {team: research}\nprofiles: {far: {region: ap-east-1}}"
    )
    own = config(tags={"stage": "prod"}, image={"uri": "111122223333.dkr.ecr.eu-west-1.amazonaws.com/mine:1"})
    job = launcher.load(own)
    assert (job.region, job.tags) == ("eu-west-1", {"team": "research", "stage": "prod"})
    assert job.image.framework_version is None and "image" not in job.defaults
    assert launcher.load(own, ["profile=far"]).region == "ap-east-1"
    assert launcher.load(own, ["profile=production"]).region == "us-east-1", "the user's profile before the project"
    assert launcher.load(own, ["profile=far", "region=sa-east-1"]).region == "sa-east-1"
    none = launcher.load(own, ["region=null", "tags.team=ours"])
    assert none.region is None and none.tags["team"] == "ours" and "region" not in none.defaults


def test_the_projects_file_is_found_from_below_inside_its_repository_only(here, monkeypatch):
    write(here / defaults.PROJECT_FILE, "region: eu-west-1")
    (here / "code/deep").mkdir()
    monkeypatch.chdir(here / "code/deep")
    assert defaults.project_file() == here / "code/deep" / defaults.PROJECT_FILE
    (here / ".git").mkdir()
    assert defaults.project_file() == here / defaults.PROJECT_FILE
    (here / "code/.git").mkdir()  # a repository of its own
    assert defaults.project_file() == here / "code/deep" / defaults.PROJECT_FILE


def test_defaults_go_before_the_placeholders_of_the_kits_configs_but_not_before_what_is_typed(here):
    kit = ROOT / "configs/quickstart_teacher.yaml"
    job = launcher.load(kit)
    assert (job.role, job.region) == ("arn:aws:iam::111122223333:role/Mine", "eu-central-1")
    assert job.output == "s3://acme-runs/vision" and job.image.framework_version != "2.6.0"
    typed_in = {
        "role": "arn:aws:iam::123456789012:role/Other",
        "region": "eu-west-1",
        "output": "s3://amzn-s3-demo-x/y",
    }
    for key, value in typed_in.items():
        assert getattr(launcher.load(kit, [f"{key}={value}"]), key) == value
    mine = config(role="arn:aws:iam::123456789012:role/Copied", region="sa-east-1", output="s3://our-bucket/x")
    job = launcher.load(mine)
    assert (job.role.split("/")[1], job.region, job.output) == ("Mine", "sa-east-1", "s3://our-bucket/x")
    assert launcher.load(config(output="s3://my-bucket-of-ours/x")).output == "s3://my-bucket-of-ours/x"
    defaults.user_file().unlink()
    job = launcher.load(kit)
    assert "123456789012" in job.role and job.region == "us-east-1" and not job.defaults


def test_the_emulator_knows_no_defaults(here, tmp_path, monkeypatch):
    emulated = emulator.start([ROOT / "configs/quickstart_teacher.yaml"], tmp_path / "emulator")
    try:
        assert emulated.environment["LAUNCHER_DEFAULTS"] == "off"
    finally:
        emulated.close()
    monkeypatch.setenv("LAUNCHER_DEFAULTS", "off")
    assert "123456789012" in launcher.load(ROOT / "configs/quickstart_teacher.yaml").role
    job = launcher.from_values({"name": "mine", "script": "train.py", "source": "code", "profile": "production"})
    assert job.region is None and job.profile == "production", "a profile means nothing then"


def test_python_gets_them_too_and_a_replay_keeps_what_its_run_had(here, capsys):
    values = {"name": "mine", "script": "train.py", "source": "code"}
    assert launcher.from_values(values).region == "eu-central-1"
    done = launcher.run(launcher.plan(launcher.from_values(values)))
    assert done.wait() == "Completed"
    recorded = json.loads((done.folder.path / "plan.json").read_text())
    assert recorded["defaults"]["region"].endswith("(line 3)")
    write(defaults.user_file(), "region: ap-east-1\ntags: {team: others, more: x}\nnetwork: {isolation: true}")
    again = launcher.replay(done.name).job
    assert not again.network.isolation and (again.region, again.tags) == (
        "eu-central-1",
        {"team": "vision", "stage": "dev"},
    )
    code, _, reported = typed(capsys, "replay", done.name, "profile=production")
    assert code == 2 and "keeps the role, region and network that it had" in reported


def test_every_mistake_in_both_files_and_the_config_is_reported_at_once(here, capsys):
    write(defaults.user_file(), "regoin: eu-west-1\noutput: acme\nenvironment: {A: b}\nprofiles: {a b: {}, c: 3}")
    write(here / defaults.PROJECT_FILE, "hyperparameters: {epochs: 1}\nimage: {python: py312}\ntags: {api_key: abc}")
    code, _, reported = typed(capsys, "plan", str(config(nmae="x")))
    assert code == 2
    user = defaults.user_file()
    for line in (
        "nmae (line 2): unknown key",
        f"{user}: regoin (line 1): unknown key",
        "did you mean region?",
        f"{user}: output (line 2): 'acme' (text)",
        f"{user}: environment (line 3): no default: defaults hold no secrets",
        f"{user}: profiles.a b (line 4): no name of a profile",
        f"{user}: profiles.c (line 4): 3 (a whole number)",
        "launcher-defaults.yaml: hyperparameters (line 1): no default",
        "launcher-defaults.yaml: image (line 2): python without framework_version",
        "launcher-defaults.yaml: tags.api_key (line 3): what seems to be a secret",
    ):
        assert line in reported, reported
    assert "abc" not in reported, "what may be a secret is not printed"


def test_a_profile_that_is_nowhere_is_refused_with_those_there_are(here):
    with pytest.raises(launcher.UserError) as error:
        launcher.load(config(), ["profile=prodution"])
    assert "did you mean production?" in str(error.value)
    with pytest.raises(launcher.UserError, match="launcher defaults profile=far region=us-west-2"):
        launcher.load(config(), ["profile=far"])


def test_defaults_are_set_and_shown_by_a_command(here, capsys):
    file = defaults.user_file()
    file.unlink()
    code, shown, _ = typed(capsys, "defaults")
    assert code == 0 and f"set once, in {file}" in shown and "launcher defaults role=arn:aws:iam::" in shown
    assert typed(capsys, "defaults", "region=us-east-1", "tags.cost=4711", "image.framework_version=2.10")[0] == 2
    assert not file.exists(), "an image without its Python leaves nothing behind"
    words = ["region=us-east-1", "tags.cost=4711", "image.framework_version=2.10", "image.python=py313"]
    assert typed(capsys, "defaults", *words)[0] == 0
    assert file.read_text().startswith("# ") and yaml.safe_load(file.read_text()) == {
        "region": "us-east-1",
        "tags": {"cost": "4711"},
        "image": {"framework_version": "2.10", "python": "py313"},
    }
    assert typed(capsys, "defaults", "profile=far", "region=ap-east-1", "network.isolation=true")[0] == 0
    code, shown, _ = typed(capsys, "defaults", "profile=far", "--json")
    reported = json.loads(shown)
    assert {one["key"]: one["value"] for one in reported["defaults"]} == {
        "image": {"framework_version": "2.10", "python": "py313"},
        "network.isolation": True,
        "region": "ap-east-1",
        "tags.cost": "4711",
    }
    assert reported["profiles"] == ["far"] and reported["files"]["user"] == str(file)
    assert typed(capsys, "defaults", "region=", "--project")[0] == 0
    assert typed(capsys, "defaults", "tags.team=ours", "--project")[0] == 0
    code, shown, _ = typed(capsys, "defaults")
    assert [line.split() for line in shown.splitlines() if "tags.team" in line] == [
        ["tags.team", "ours", "launcher-defaults.yaml", "(line", "2)"]
    ]
    assert "launcher-defaults.yaml (line 2)" in shown and "other profiles, by profile=NAME: far" in shown
    assert launcher.load(config()).region == "us-east-1", "what the project unsets is not set there"


def test_a_command_that_would_write_a_wrong_default_writes_nothing(here, capsys):
    before = defaults.user_file().read_text()
    words = ["region=nowhere", "tags.token=abc", "hyperparameters.epochs=1", "nonsense", "profile=a b"]
    code, _, reported = typed(capsys, "defaults", *words)
    assert code == 2 and "nonsense: no default without a key" in reported and "profile: a b" in reported
    code, _, reported = typed(capsys, "defaults", *words[:3])
    assert code == 2 and "region: 'nowhere' (text)" in reported and "hyperparameters: no default" in reported
    assert "tags.token: what seems to be a secret" in reported and "abc" not in reported
    assert defaults.user_file().read_text() == before
    defaults.user_file().write_text("region: [")
    code, _, reported = typed(capsys, "defaults", "region=us-west-2")
    assert code == 2 and "not YAML" in reported and defaults.user_file().read_text() == "region: ["
    assert typed(capsys, "defaults", "--project")[0] == 2


@pytest.mark.parametrize("text", ["", "# region: us-west-2\n", "\n\n# all\n# of it\n"])
def test_a_file_without_a_default_is_none(here, capsys, text):
    defaults.user_file().write_text(text)
    assert launcher.load(config()).defaults == {}
    assert typed(capsys, "defaults", "region=us-west-2")[0] == 0
    assert defaults.user_file().read_text().startswith(text) and launcher.load(config()).region == "us-west-2"


def test_a_first_config_leaves_out_what_defaults_give(here, capsys):
    code, reported, _ = typed(capsys, "init", "--script", "code/train.py")
    assert code == 0 and "SageMaker still needs compute.instance_type: to be written into job.yaml\n" in reported
    text = Path("job.yaml").read_text()
    assert "SageMaker's role, region, output and image: from your defaults" in text and "# role:" not in text
    defaults.user_file().write_text("region: us-west-2")
    code, reported, _ = typed(capsys, "init", "--script", "code/train.py", "--force")
    assert "launcher defaults sets role, output and image once, for every job\n" in reported
    text = Path("job.yaml").read_text()
    assert "# role: arn" in text and "# region:" not in text and "SageMaker's region: from your defaults" in text


def test_a_projects_defaults_do_not_travel(here):
    write(here / "code" / defaults.PROJECT_FILE, "region: us-west-2")
    plan = launcher.plan(launcher.load(config()))
    assert "train.py" in [file.path for file in plan.files]
    assert not [file.path for file in plan.files if file.path.endswith(defaults.PROJECT_FILE)]


def test_what_an_alias_gives_stands_on_the_aliass_line(here):
    text = "network: &ours {subnets: [subnet-0a1b2c3d]}\nprofiles:\n  far:\n    network: *ours\n  near: {<<: {region: us-east-1}}\n"
    defaults.user_file().write_text(text)
    found = {one.key: one.origin for one in defaults.read("far")}
    assert found["network.subnets"].endswith("profile far (line 4)")
    found = {one.key: one.origin for one in defaults.read("near")}
    assert found["region"].endswith("profile near (line 5)")


def test_the_documents_example_is_a_projects_file(here):
    defaults.user_file().unlink()
    write(here / defaults.PROJECT_FILE, the_block("yaml", "# launcher-defaults.yaml"))
    job = launcher.load(config(), ["profile=production"])
    assert job.region == "us-east-1" and {key.split(".")[0] for key in job.defaults} == {
        "image",
        "network",
        "region",
        "tags",
    }


def test_what_is_set_is_unset_and_a_wrong_key_can_be_removed(here, capsys):
    file = defaults.user_file()
    assert typed(capsys, "defaults", "tags.team=", "role=", "profile=production", "network.subnets=")[0] == 0
    assert yaml.safe_load(file.read_text())["tags"] == {"team": "vision", "stage": "dev"}, "it was the profile's"
    assert typed(capsys, "defaults", "tags.team=", "role=")[0] == 0
    assert yaml.safe_load(file.read_text()) == {
        "region": "eu-central-1",
        "output": "s3://acme-runs/vision",
        "image": {"framework_version": "2.6.0", "python": "py312"},
        "tags": {"stage": "dev"},
        "profiles": {"production": {"region": "us-east-1", "network": {"security_groups": ["sg-0a1b2c3d"]}}},
    }
    write(file, wrong := "regoin: x  # mine\n# theirs\nregion: us-west-2\nnetwork: 3\n")
    for words in (["tags.team=a"], ["regoin="]):
        code, out, reported = typed(capsys, "defaults", *words)
        assert code == 2 and "network (line 4): 3 (a whole number)" in reported and "which is left as it is" in reported
        assert ("did you mean region?" in reported) == (words != ["regoin="]) and "wrote" not in out + reported
        assert file.read_text() == wrong
    assert typed(capsys, "defaults", "regoin=", "network=", "tags.team=a")[0] == 0
    assert file.read_text() == "# theirs\nregion: us-west-2\ntags: {team: a}\n"
    write(file, "- a\n")
    code, _, reported = typed(capsys, "defaults", "tags.team=a")
    assert code == 2 and "valid: a mapping with role, region, output" in reported and file.read_text() == "- a\n"
    assert "fix:   write `key: value` lines, for example region: us-west-2" in reported


@pytest.mark.parametrize("text", ["network: &ours {isolation: false}\nprofiles:\n  far: {network: *ours}\n"])
def test_a_key_behind_an_alias_is_not_set_somewhere_else(here, capsys, text):
    write(defaults.user_file(), text)
    code, _, reported = typed(capsys, "defaults", "profile=far", "network.isolation=true")
    assert code == 2 and "edit the file itself" in reported and defaults.user_file().read_text() == text


@pytest.mark.parametrize(
    "words",
    [["tags.api_key=[hunter2pass"], [f"ghp_{'a1B2' * 9}"], [f"=ghp_{'a1B2' * 9}"], [f"profile=ghp_{'a1B2' * 9} x"]],
)
def test_a_typed_secret_is_not_printed(here, capsys, words):
    code, out, reported = typed(capsys, "defaults", *words)
    assert code == 2 and "hunter2pass" not in reported + out and "a1B2a1B2" not in reported + out


def test_a_machine_without_a_home_and_a_folder_that_is_closed_have_no_defaults_of_ones_own(here, monkeypatch):
    monkeypatch.delenv("XDG_CONFIG_HOME")
    monkeypatch.setattr(Path, "home", classmethod(lambda _: (_ for _ in ()).throw(RuntimeError("no home"))))
    assert launcher.load(config()).defaults == {}
    write(here / defaults.PROJECT_FILE, "region: eu-west-1")
    assert launcher.load(config()).region == "eu-west-1"
    monkeypatch.setenv("XDG_CONFIG_HOME", "relative")
    with pytest.raises(launcher.UserError, match="set HOME or XDG_CONFIG_HOME"):
        defaults.user_file()
    monkeypatch.setattr(Path, "exists", lambda _: (_ for _ in ()).throw(PermissionError(13, "closed")))
    assert launcher.from_values({"name": "a", "script": "train.py", "source": "code"}).defaults == {}


def test_links_rights_and_line_ends_stay(here, capsys, tmp_path):
    target, link = tmp_path / "dotfiles.yaml", defaults.user_file()
    target.write_bytes(b"# mine\r\nregion: us-west-2\r\n")
    target.chmod(0o600)
    link.unlink()
    link.symlink_to(target)
    assert typed(capsys, "defaults", "tags.123=ä", "tags.a}=b")[0] == 0
    assert link.is_symlink() and target.stat().st_mode & 0o777 == 0o600
    assert target.read_bytes().decode() == '# mine\r\nregion: us-west-2\r\ntags: {"123": "ä", "a}": b}\r\n'
    target.unlink()
    code, _, reported = typed(capsys, "defaults", "region=us-west-2")
    assert code == 2 and "a link to a file that does not exist" in reported and link.is_symlink()


def test_a_file_of_defaults_is_no_job(here):
    write(here / defaults.PROJECT_FILE, "region: us-west-2")
    with pytest.raises(launcher.UserError, match="defaults for every job, no job itself"):
        launcher.load(defaults.PROJECT_FILE)


def test_the_rest_of_a_job_is_checked_with_the_defaults_that_are_right(here):
    write(defaults.user_file(), "regoin: x\n" + MINE)
    with pytest.raises(launcher.UserError) as error:
        plan_config(config(compute={"instance_type": "ml.m5.xlarge"}), on="aws")
    [issue] = error.value.issues
    assert "regoin" in issue.key, "role, region, output and image are not missing"


def test_many_tags_are_a_number(here):
    write(here / defaults.PROJECT_FILE, "tags:\n" + "".join(f"  tag{number}: x\n" for number in range(9)))
    assert "  defaults    9 tags from launcher-defaults.yaml" in str(launcher.plan(launcher.load(config())))
