"""Dockerfile and CI workflow agree with the project: files, extras, port, health endpoint, Python versions."""

import json
import re
import tomllib
from pathlib import Path
from urllib.error import URLError

import pytest
import yaml

from mlaforge.serving.config import ServeConfig
from support.scripted_engine import ByteTokenizer, ScriptedEngine
from support.serving import serving

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
# Instructions, continuation lines joined, comments left out.
DOCKERFILE = re.sub(r"\\\n\s*", "", re.sub(r"^#.*\n", "", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE))


def instructions(name: str) -> list[str]:
    return re.findall(rf"^(?:HEALTHCHECK .*?)?{name} (.*)$", DOCKERFILE, re.MULTILINE)


def test_the_build_context_has_what_the_dockerfile_copies():
    copied = {path for line in instructions("COPY") if "--from" not in line for path in line.split()[:-1]}
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    assert "*" in lines and copied == {line[1:] for line in lines if line.startswith("!")}
    assert all((ROOT / path).exists() for path in copied)


def test_the_image_installs_extras_of_the_project():
    (extras,) = re.findall(r"'\.\[([a-z,]+)\]'", DOCKERFILE)
    assert {"serve"} <= set(extras.split(",")) <= PROJECT["optional-dependencies"].keys()
    assert "-c constraints.txt" in DOCKERFILE
    assert json.loads(*instructions("ENTRYPOINT")) == ["mlaforge"] and "mlaforge" in PROJECT["scripts"]


def test_the_health_check_asks_the_server():
    code = json.loads(instructions("CMD")[0])[-1]
    (port,) = re.findall(r"http://127\.0\.0\.1:(\d+)/", code)
    assert int(port) == ServeConfig().port == int(*instructions("EXPOSE"))
    with serving(ScriptedEngine(ByteTokenizer())) as served:
        code = code.replace(f":{port}/", f":{served.port}/")
        exec(code, {})
    with pytest.raises(URLError):
        exec(code, {})


def test_no_process_runs_as_root():
    for stage in re.split(r"^FROM ", DOCKERFILE, flags=re.MULTILINE)[1:]:
        name, users = stage.split("\n")[0].split()[-1], re.findall(r"^USER (\S+)$", stage, re.MULTILINE)
        assert not users or users[-1] == "1000:1000", name
        assert users or name != "runtime"


def test_ci_runs_make_test_on_the_projects_python_versions():
    (job,) = yaml.safe_load((ROOT / ".github/workflows/test.yml").read_text())["jobs"].values()
    versions = job["strategy"]["matrix"]["python"]
    prefix = "Programming Language :: Python :: "
    assert versions == [name.removeprefix(prefix) for name in PROJECT["classifiers"] if name.startswith(prefix)]
    assert PROJECT["requires-python"] == f">={versions[0]}"
    *setup, test = job["steps"]
    assert test["run"] == "make test PYTHON=python${{ matrix.python }}"
    patterns = [step["with"]["key"] for step in setup if "key" in step.get("with", {})]
    hashed = [path for pattern in patterns for path in re.findall(r"'([^']+)'", pattern)]
    hashed += next(step["with"]["cache-dependency-path"].split() for step in setup if "python-version" in step["with"])
    assert len(hashed) == 5 and all(any(ROOT.glob(path)) for path in hashed)
