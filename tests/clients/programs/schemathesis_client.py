"""schemathesis: requests generated from /openapi.json get no 5xx, no undocumented status and no undocumented body."""

import os
import subprocess
import sys
from pathlib import Path

from cases import URL, case, run

SERVER = URL.removesuffix("/v1")


def fuzz(mode, *checks):
    command = [Path(sys.executable).with_name("st"), "run", f"{SERVER}/openapi.json", "--checks", ",".join(checks)]
    command += ["--phases", "examples,fuzzing", "--mode", mode, "--max-examples", "20", "--seed", "0"]
    command += ["--suppress-health-check", "all", "--request-timeout", "60", "--no-color", "--generation-database=none"]
    hooks = {"SCHEMATHESIS_HOOKS": "schemathesis_hooks", "PYTHONPATH": str(Path(__file__).parent), "COLUMNS": "120"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, **hooks})
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]


@case
def valid_requests():
    fuzz("positive", "not_a_server_error", "status_code_conformance", "response_schema_conformance")


@case
def invalid_requests():
    fuzz("negative", "not_a_server_error", "status_code_conformance")


run("schemathesis")
