"""An OpenAI endpoint that answers at once, for tests of peers: argv is a port and a file for what it was asked."""

import json
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

PORT, LOG, MOST = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.answer(b"{}")

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        with open(LOG, "a") as file:
            file.write(json.dumps(asked) + "\n")
        made = min(MOST, asked["max_tokens"])
        events = [{"choices": [{"text": "x"}]}] * made + [{"choices": [], "usage": {"completion_tokens": made}}]
        self.answer("".join(f"data: {json.dumps(event)}\n\n" for event in events).encode() + b"data: [DONE]\n\n")

    def answer(self, body):
        self.send_response(200)
        self.end_headers()
        # In pieces, so that they have times of their own.
        for line in body.splitlines(keepends=True):
            self.wfile.write(line)
            self.wfile.flush()
            time.sleep(0.001)

    def log_message(self, *words):
        pass


ThreadingHTTPServer(("127.0.0.1", PORT), Handler).serve_forever()
