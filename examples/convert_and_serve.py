"""Convert MODEL into OUT, serve OUT behind OpenAI's API, and ask it once.

Usage, after pip install 'mlaforge[serve]':
    python examples/convert_and_serve.py MODEL OUT --calibration TEXT
"""

import argparse
import json
import subprocess
import sys
import time
from urllib.error import URLError
from urllib.request import Request, urlopen

from mlaforge import convert

arguments = argparse.ArgumentParser()
arguments.add_argument("model")
arguments.add_argument("out")
arguments.add_argument("--calibration", default="embedded", help="text like what the model will serve")
arguments.add_argument("--seqlen", type=int, default=2048)
arguments.add_argument("--port", type=int, default=8000)
given = arguments.parse_args()
convert(given.model, given.out, calibration=given.calibration, seqlen=given.seqlen)
server = subprocess.Popen([sys.executable, "-m", "mlaforge", "serve", given.out, "--port", str(given.port)])
url = f"http://127.0.0.1:{given.port}"
try:
    while server.poll() is None:
        try:
            urlopen(f"{url}/health").close()
            break
        except URLError:
            time.sleep(0.2)
    body = json.dumps({"prompt": "The capital of France is", "max_tokens": 16, "temperature": 0}).encode()
    with urlopen(Request(f"{url}/v1/completions", body, {"content-type": "application/json"})) as answer:
        print(json.load(answer)["choices"][0]["text"])
finally:
    server.terminate()
    server.wait()
