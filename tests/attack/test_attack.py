"""What the attack draws is the same from the same seed, and what it judges is judged right."""

from __future__ import annotations

import json
import signal
import time
from random import Random

import pytest


def test_the_same_dice_draw_the_same_request():
    from attack import fuzz

    every = [[fuzz.draw(Random(f"0/{n}")) for n in range(400)] for _ in range(2)]
    assert every[0] == every[1] and every[0] != [fuzz.draw(Random(f"1/{n}")) for n in range(400)]
    kinds = {request.kind.split(":")[0] for request in every[0]}
    assert kinds >= {"valid", "fields", "damaged JSON", "messages", "head", "constrained", "grammar bomb"}
    # What must be answered is right JSON, and ends soon.
    for request in every[0]:
        if request.kind == "valid":
            body = json.loads(request.body)
            limit = body.get("max_tokens", body.get("max_output_tokens", 0))
            assert limit <= 8 and request.expected == (200,)


@pytest.mark.parametrize("seed", range(60))
def test_a_damage_changes_the_file(seed, tiny_models, tmp_path):
    from attack import damages

    names = ("config.json", "model.safetensors", "tokenizer.json", "recipe.yaml", "lines.jsonl", "x.gguf")
    path = tmp_path / names[seed % len(names)]
    source = tiny_models["llama"] / path.name
    before = source.read_bytes() if source.exists() else b'device: cpu\n{"text": "a"}\n' * 9
    path.write_bytes(before)
    done = damages.damage(Random(seed), path)
    assert done.what.startswith(f"{path.name}: ")
    assert not path.is_file() or path.read_bytes() != before
    assert {other.name for other in tmp_path.iterdir()} <= {path.name}


def ended(code=0, stderr="", stopped=""):
    from attack.processes import Ended

    return Ended(["convert", "m"], code, "", stderr, 1.0, stopped)


def test_faults_of_a_command():
    assert ended().fault == "" == ended(2, "50%|##\nmlaforge: no\n").fault
    assert "traceback" in ended(1, "Traceback (most recent call last):\n  x\nKeyError: 1\n").fault
    assert "signal 11" in ended(-11).fault and "without a line" in ended(2, "Usage: x\n").fault
    assert ended(-9, stopped="it ran longer than 1 s").fault == "it ran longer than 1 s"


def test_what_a_kill_may_leave(tmp_path):
    from attack import kills

    out = tmp_path / "out"
    out.mkdir()
    (out / "a.safetensors").write_bytes(b"1")
    (out / "manifest.json").write_text(json.dumps({"seconds": {"a": 1}, "metrics": {"kl": 2, "tokens_per_second": 3}}))
    whole = kills.contents(out)
    (out / "manifest.json").write_text(json.dumps({"seconds": {"a": 9}, "metrics": {"kl": 2, "tokens_per_second": 4}}))
    assert kills.contents(out) == whole and kills.resumed(ended(), out, whole) == ""
    assert (
        kills.judge(ended(-9), signal.SIGKILL, out, whole) == "" == kills.judge(ended(130), signal.SIGINT, out, whole)
    )
    assert "exit code 1" in kills.judge(ended(1), signal.SIGINT, out, whole)
    (out / "a.safetensors").write_bytes(b"2")
    assert "half a result: a.safetensors differs" in kills.judge(ended(-9), signal.SIGKILL, out, whole)
    assert "something else: a.safetensors differs" in kills.resumed(ended(), out, whole)
    (out / "a.safetensors").write_bytes(b"1")
    (tmp_path / ".out.partial").mkdir()
    assert kills.resumed(ended(), out, whole) == "it leaves ['.out.partial']"
    assert "the same command again: exit code 2" in kills.resumed(ended(2, "mlaforge: no"), out, whole)


def test_corruptions_that_must_be_seen(tmp_path):
    from attack import corruptions, damages

    class Case:
        def __init__(self, name, certain=True):
            self.file, self.damage, self.out = (
                tmp_path / name,
                damages.Damage("x", certain),
                tmp_path / "results" / "out",
            )

    fault = corruptions.fault
    assert fault(Case("model.safetensors"), ended()) == "it was accepted"
    assert fault(Case("model.safetensors", False), ended()) == "" == fault(Case("generation_config.json"), ended())
    assert fault(Case("config.json"), ended(2, "mlaforge: no")) == ""
    (tmp_path / "results" / ".out.partial").mkdir(parents=True)
    assert fault(Case("config.json"), ended(2, "mlaforge: no")) == "refused, and left ['.out.partial']"
    assert "exit code 1" in fault(Case("config.json"), ended(1, "what"))


def test_the_witness_and_what_was_under_way(tmp_path):
    from attack import witness
    from attack.ledger import Ledger
    from attack.served import Served

    path = tmp_path / "server-part-1.waits"
    now = time.monotonic()
    lines = [("first", 10, 1), ("gap", 11, 1), ("gap", 20, 0.5), ("gap", 32, 2.5), ("refused", 33, 429)]
    path.write_text("".join(f"{kind} {now + at} {seconds}\n" for kind, at, seconds in lines) + "gap 4")
    waits = witness.read(path)
    assert len(waits) == 5 and witness.largest(waits, "gap").seconds == 2.5
    ledger = Ledger("part", 0, tmp_path)
    served = Served(tmp_path, ledger, tmp_path, [], 1)
    served.waits, served._lives = path, 1
    served._measuring = [(now + 9, now + 12, "a step")]
    served._attacks = [(now + 29, now + 30, "short"), (now + 25, now + 40, "long"), (now, now + 15, "over")]
    seen = served.facts()["witness"]
    assert (seen["largest_gap"], seen["largest_step"], seen["refused"]) == (2.5, 1.0, 1)
    assert seen["largest_gaps"][0]["during"] == ["long", "short"] and ledger.failures == ["part-witness gap"]
    assert served.refused_during("long") == 1 and served.refused_during("over") == 0
