"""Peak memory of converting a model of GPT-OSS-20B's geometry, by its number of layers.

    python benchmarks/memory.py [--layers 2 4] [--experts 32] [--out benchmarks/memory.json]

The checkpoint is a sparse file: shapes, dtypes and MXFP4 packing are the real ones, all weights are zero, so that it
takes no room and every tensor is as large as the real one. Each conversion runs in a process of its own, in fp32 on the
CPU, with a window of 2048 tokens as `convert` takes them by default; one stands for any number of them, because
they are worked on one after another. What counts is anonymous memory (RssAnon): pages of the weight files that the
kernel may drop are not in it. About 15 minutes on two cores.
"""

from __future__ import annotations

import argparse
import json
import shutil
import struct
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import psutil
from rows import Results, parser

CONFIG = {
    "model_type": "gpt_oss", "architectures": ["GptOssForCausalLM"], "hidden_size": 2880, "intermediate_size": 2880,
    "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "num_experts_per_tok": 4,
    "vocab_size": 201088, "sliding_window": 128, "tie_word_embeddings": False, "dtype": "bfloat16",
    "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "attention_bias": True,
    "rope_parameters": {"rope_type": "yarn", "rope_theta": 150000.0, "factor": 32.0, "beta_fast": 32.0,
                        "beta_slow": 1.0, "truncate": False, "original_max_position_embeddings": 4096},
    "quantization_config": {"quant_method": "mxfp4"},
}  # fmt: skip


def write_sparse(directory: Path, layers: int, experts: int) -> int:
    """A checkpoint of that geometry in one sparse file; returns the bytes it would take."""
    from mlaforge.checkpoint import loading, reader
    from mlaforge.demo import model as demo_model

    config = {**CONFIG, "num_hidden_layers": layers, "num_local_experts": experts}
    shapes, _, _ = loading.expected_tensors(config)
    header, at = {}, 0
    for name, shape in shapes.items():
        packed = name.endswith(("_blocks", "_scales"))
        size = 1 if packed else 2
        for dim in shape:
            size *= dim
        header[name] = {"dtype": "U8" if packed else "BF16", "shape": shape, "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    with (directory / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + at)
    (directory / "config.json").write_text(json.dumps(config))
    for path in reader.companions(demo_model.fetch()):
        shutil.copyfile(path, directory / path.name)
    return at


def convert_and_watch(source: Path, out: Path, layout: str) -> dict[str, Any]:
    """Converts in this process; peak RssAnon in GiB over all of it, and seconds."""
    from mlaforge.conversion import convert
    from mlaforge.conversion.config import ConvertConfig

    peak, done, own = 0, threading.Event(), psutil.Process()

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.02):
            resident = own.memory_info()
            peak = max(peak, resident.rss - resident.shared)

    watcher = threading.Thread(target=watch)
    watcher.start()
    start = time.perf_counter()
    config = ConvertConfig(
        layout=layout, budget=0.5, calibration="embedded", nsamples=1, eval_windows=0, device="cpu"
    )  # fmt: skip
    try:
        stages = convert.run(str(source), out, config).seconds
    finally:
        done.set()
        watcher.join()
    return {"peak_gib": peak / 2**30, "seconds": time.perf_counter() - start, "stages": stages}


def main() -> None:
    arguments = parser(__doc__, "benchmarks/memory.json", data=False)
    arguments.add_argument("--layers", type=int, nargs="+", default=[2, 4])
    arguments.add_argument("--experts", type=int, default=32)
    arguments.add_argument("--layout", default="latent_rope")
    arguments.add_argument("--worker", nargs=2, type=Path, help=argparse.SUPPRESS)
    options = arguments.parse_args()
    if options.worker:
        print(json.dumps(convert_and_watch(*options.worker, options.layout)))
        return
    results = Results(options.out, [])
    for layers in options.layers:
        with tempfile.TemporaryDirectory(dir=options.out.parent) as folder:
            source = Path(folder) / "source"
            source.mkdir()
            size = write_sparse(source, layers, options.experts)
            command = [sys.executable, __file__, "--layout", options.layout, "--worker", source, Path(folder) / "out"]
            printed = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
        measured = {"checkpoint_gib": size / 2**30, **json.loads(printed)}
        results.add({"layers": layers, "experts": options.experts, **measured})
    first, last = results.rows[0], results.rows[-1]
    slope = (last["peak_gib"] - first["peak_gib"]) / max(1, last["layers"] - first["layers"])
    results.body["gib_per_layer"] = slope
    results.save()
    print(f"{slope:.4f} GiB per layer")


if __name__ == "__main__":
    main()
