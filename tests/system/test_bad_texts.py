"""Unusable texts, and evaluation on text that the model was tuned on."""

from __future__ import annotations

import pytest

TEXTS = {
    "absent.txt": (None, "does not exist"),
    "empty.txt": (b"", "is empty"),
    "blank.txt": (b" \n\n" * 400, "is empty"),
    "short.txt": (b"Too little.", "fewer than 64 tokens"),
    "latin1.txt": ("Gr\xfc\xdfe ".encode("latin-1") * 400, "not UTF-8 text (byte 2)"),
    "line.jsonl": (b'{"text": "a"}\n{"text": "b"\n', "line 2"),
    "key.jsonl": (b'{"text": "a"}\n\n{"txt": "b"}\n', "line 3"),
    "null.jsonl": (b'{"text": null}\n' * 400, "line 1"),
    "list.jsonl": (b'["text"]\n' * 400, "line 1"),
    "half.jsonl": (b'{"text": "\\ud83d"}\n' * 400, "line 1"),
}


@pytest.mark.parametrize("option", ["--calibration", "--evaluation", "--text"])
@pytest.mark.parametrize("name", TEXTS)
def test_rejects_unusable_texts(name, option, tiny_models, refused, short, tmp_path):
    content, word = TEXTS[name]
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    if option == "--text":
        refused((word, str(path)), "eval", tiny_models["llama"], tmp_path / "out", "--text", path, "--seqlen", 64)
    else:
        refused((word, str(path)), "convert", tiny_models["llama"], tmp_path / "out", *short, option, path)


def test_rejects_unreadable_texts(tiny_models, refused, short, tmp_path):
    text = "/proc/self/mem"  # a file that even root cannot read from its start
    refused((text, "cannot be read"), "convert", tiny_models["llama"], tmp_path / "out", *short, "--calibration", text)
    (tmp_path / "ring").symlink_to("ring")
    refused("ring", "convert", tiny_models["llama"], tmp_path / "out", *short, "--calibration", tmp_path / "ring")


def test_rejects_a_folder_without_text(tiny_models, refused, short, tmp_path):
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "photo.png").write_bytes(b"\x89PNG")
    refused("holds no text file", "convert", tiny_models["llama"], tmp_path / "out", *short, "--calibration",
            tmp_path / "texts")  # fmt: skip


@pytest.mark.parametrize("seqlen", [48, 64, 200])
def test_evaluation_on_the_calibration_text_is_refused(seqlen, tiny_models, refused, short, tmp_path, calibration_file):
    """The same file for both, with most of its windows."""
    more = ("--evaluation", calibration_file, "--seqlen", seqlen, "--nsamples", 40, "--eval-windows", 40)
    words = ("evaluation windows", "calibration text", calibration_file.name)
    refused(words, "convert", tiny_models["llama"], tmp_path / "out", *short, *more)


def test_a_converted_model_records_its_calibration_passages(
    tiny_models, converts, cli, refused, tmp_path, calibration_file, evaluation_file
):
    converts(tiny_models["llama"], tmp_path / "out", "--nsamples", 40)
    copy = tmp_path / "renamed.md"
    copy.write_text("Not the same file.\n\n" + calibration_file.read_text())
    refused("calibration", "eval", tmp_path / "out", tmp_path / "e", "--text", copy, "--windows", 100, "--seqlen", 100)
    assert cli("eval", tmp_path / "out", "--text", evaluation_file, "--seqlen", 100).exit_code == 0
    assert cli("eval", tiny_models["llama"], "--text", copy, "--seqlen", 100).exit_code == 0
    for damage in ("{", '{"a": 1}', '["x"]', "[-1]"):
        (tmp_path / "out" / "calibration_passages.json").write_text(damage)
        refused("damaged", "eval", tmp_path / "out", "--text", evaluation_file, "--seqlen", 100)
