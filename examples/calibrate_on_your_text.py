"""Make calibration sets from a folder of your text, convert MODEL with them, and measure on other text.

Usage:
    pip install 'mlaforge[calibrate]'
    python examples/calibrate_on_your_text.py MODEL OUT YOUR_TEXT OTHER_TEXT
"""

import argparse

from mlaforge import calibrate, convert, evaluate

arguments = argparse.ArgumentParser()
arguments.add_argument("model")
arguments.add_argument("out")
arguments.add_argument("text", help="file or folder: what the model will serve")
arguments.add_argument("other", help="file or folder that shares nothing with it, to judge on")
arguments.add_argument("--clusters", type=int, default=64)
arguments.add_argument("--seqlen", type=int, default=2048)
given = arguments.parse_args()

sets = f"{given.out}-sets"
calibrate(out=sets, source=(given.text,), clusters=given.clusters)
# OUT carries hashes of the sets: `evaluate` refuses text that overlaps them.
convert(given.model, given.out, calibration=sets, seqlen=given.seqlen, eval_windows=0)
ppl = {name: evaluate(name, text=given.other, seqlen=given.seqlen).metrics["ppl"] for name in (given.model, given.out)}
print(f"perplexity {ppl[given.model]:.3f} -> {ppl[given.out]:.3f}, ratio {ppl[given.out] / ppl[given.model]:.4f}")
