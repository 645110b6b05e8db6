r"""What should a model be calibrated on that nothing is known of? SmolLM2 converted on its own text, and on others'.

    python -m research.self_calibration --data ../shared/data [--windows 8] [--seeds 3] [--folder runs/self]
    python -m research.self_calibration --data ../shared/data --windows 32 --wiki-windows 16 --seeds 1 \
      --dtype float32 --forms "coded 25 %" "latent 50 %" "latent_rope 50 %" --table "self, 65,536 tokens"

Every way takes the same number of tokens in windows of 2048: `self` what the model wrote, `embedded`, `wiki`
(WikiText-2's validation text), `self, embedded` by halves, `golden` (what `mlaforge calibrate` chooses of embedded and
wiki). Seeds are those of the text that is written, of the windows that are taken, of the clusters, and of the labels
that calibration samples. Judged on text that none of them holds: WikiText-2's test text, Python source of
installed packages, grade-school mathematics, questions to an assistant, and descriptions of data sets. Coded rows of 4
bits, `latent` and `latent_rope` at 50 % in plain rows. A run that was cut off goes on.
"""

from __future__ import annotations

import argparse
import shutil
import sysconfig
from pathlib import Path
from typing import Any

import torch

from benchmarks.script import evaluation_texts, parser, run, wikitext, without_repeats
from mlaforge.bench.conversion import perplexities
from mlaforge.bench.results import Results
from mlaforge.calibration import calibrate
from mlaforge.calibration.config import CalibrateConfig
from mlaforge.checkpoint.source_model import SourceModel
from mlaforge.conversion import convert
from mlaforge.conversion.config import ConvertConfig
from mlaforge.data import corpus, overlap
from mlaforge.demo import model as demo_model
from mlaforge.rendering.table import markdown_table
from mlaforge.synthesis.self_generated_text import self_generated_text
from research.calibration import cells, spread_rows

SEQLEN = 2048
WAYS = ("self", "self, embedded", "embedded", "wiki", "golden")
FORMS: dict[str, dict[str, Any]] = {
    "coded 25 %": {"bits": 4.0}, "latent 50 %": {"layout": "latent", "budget": 0.5},
    "latent_rope 50 %": {"layout": "latent_rope", "budget": 0.5},
}  # fmt: skip
EVAL_TEXTS = ("wiki", "packages", "maths", "chat", "prose")
# Packages that are installed with mlaforge, with their files; folder of scikit-learn's descriptions of data sets.
PACKAGES, PROSE = ("transformers/generation", "safetensors", "tqdm", "yaml"), "sklearn/datasets/descr"


def load_eval_texts(tokenizer: Any, options: argparse.Namespace, tuned: list[int]) -> dict[str, corpus.Windows]:
    """Windows of the evaluation texts without any that a way may be tuned on."""
    window_counts = dict.fromkeys(("maths", "chat"), options.judged_windows) | {"wiki": options.wiki_windows}
    texts = evaluation_texts(tokenizer, options.data, window_counts, SEQLEN, options.folder)
    site = Path(sysconfig.get_paths()["purelib"])
    sources = {
        "packages": [p for folder in PACKAGES for p in sorted((site / folder).rglob("*.py"))],
        "prose": sorted((site / PROSE).glob("*.rst")),
    }
    for name, files in sources.items():
        (path := options.folder / f"{name}.txt").write_text("\n\n".join(p.read_text("utf-8") for p in files), "utf-8")
        texts[name] = corpus.windows(tokenizer, str(path), options.judged_windows, SEQLEN, seed=0)
    return without_repeats({name: texts[name] for name in EVAL_TEXTS}, tuned)


def texts_of(way: str, seed: int, options: argparse.Namespace, model: Path) -> tuple[str, ...]:
    """Arguments of `convert --calibration`."""
    wiki = wikitext(options.data)[0]
    if way != "golden":
        return tuple(wiki if text == "wiki" else text for text in way.split(", "))
    config = CalibrateConfig(source=(corpus.EMBEDDED, wiki), seed=seed, tokenizer=str(model), device="cpu")
    calibrate.run(golden := options.folder / f"golden-{seed}", config, embedded=options.folder / "embedded")
    return (str(golden),)


def measure(options: argparse.Namespace) -> Results:
    options.folder.mkdir(parents=True, exist_ok=True)
    model = demo_model.fetch()
    source = SourceModel.open(model)
    settings = {
        "windows": options.windows, "seqlen": SEQLEN, "judged_windows": options.judged_windows,
        "wiki_windows": options.wiki_windows, "dtype": options.dtype,
    }  # fmt: skip
    results = Results(options.raw, [], resume=True, settings=settings)
    tokens = options.windows * SEQLEN
    tuned_windows = [corpus.windows(source.tokenizer, wikitext(options.data)[0], 10**6, SEQLEN)]
    tuned_windows += [
        self_generated_text(source, tokens, seed, "cpu").windows(options.windows, SEQLEN)
        for seed in range(options.seeds)
    ]
    tuned_passages = [passage for windows in tuned_windows for passage in overlap.passages(windows)]
    for documents in corpus.embedded_documents().values():
        text = "\n\n".join(text for name, text in sorted(documents.items()) if not corpus.is_evaluation_document(name))
        tuned_passages += overlap.passages(corpus.Windows(corpus.tokens(source.tokenizer, text)[None], corpus.EMBEDDED))
    texts = load_eval_texts(source.tokenizer, options, tuned_passages)
    results.body["tokens"] = {name: w.ids.numel() for name, w in texts.items()}
    cpu, dtype = torch.device("cpu"), getattr(torch, options.dtype)
    original = results.once("original", lambda: perplexities(model, texts, "original", cpu, dtype))
    row_keys = ({"way": way, "seed": seed, "form": form} for seed in range(options.seeds) for way in options.ways
             for form in options.forms)  # fmt: skip
    for row in results.missing(row_keys):
        config = ConvertConfig(
            calibration=texts_of(row["way"], row["seed"], options, model), nsamples=options.windows, seqlen=SEQLEN,
            eval_windows=0, seed=row["seed"], device="cpu", dense=True, **FORMS[row["form"]],
        )  # fmt: skip
        out = options.folder / "converted"
        calibrated = options.folder / "calibrated" / f"{row['way'].replace(', ', '-')}-{row['seed']}"
        manifest = convert.run(str(model), out, config, calibrated=calibrated)
        assert manifest.inputs["calibration"]["tokens"] == options.windows * SEQLEN, row
        ppl = perplexities(out, texts, " ".join(map(str, row.values())), cpu, dtype)
        shutil.rmtree(out)
        results.add({**row, "ppl": ppl, "ratio": {name: ppl[name] / original[name] for name in texts}})
    return results


def short(body: dict[str, Any]) -> list[dict[str, Any]]:
    return spread_rows(body["rows"], "form", "way")


def table(rows: list[dict[str, Any]]) -> str:
    lines = [[row["form"], row["way"], *cells(row, EVAL_TEXTS)] for row in rows]
    return markdown_table([["rows", "calibrated on", *EVAL_TEXTS], *lines])


if __name__ == "__main__":
    arguments = parser(__doc__, "research/calibration.json", "self")
    arguments.add_argument("--windows", type=int, default=8, help="calibration windows")
    arguments.add_argument("--judged-windows", type=int, default=2, help="windows of each evaluation text")
    arguments.add_argument("--wiki-windows", type=int, default=2, help="windows of WikiText-2's test text")
    arguments.add_argument(
        "--dtype", default="bfloat16", choices=("float32", "bfloat16"), help="dtype of the evaluation"
    )
    arguments.add_argument("--seeds", type=int, default=3)
    arguments.add_argument("--ways", nargs="*", choices=WAYS, default=WAYS)
    arguments.add_argument("--forms", nargs="*", choices=[*FORMS], default=[*FORMS][:2])
    arguments.add_argument("--folder", type=Path, default=Path("runs/self"), help="folder of intermediate files")
    run(arguments, measure, short, table)
