"""An OpenAI endpoint that answers at once, for tests of peers. argv: port, file for the requests, maximal tokens."""

import json
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

PORT, LOG, MOST = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.answer(b"{}")

    def do_POST(self):
        payload = json.loads(self.rfile.read(int(self.headers["content-length"])))
        with open(LOG, "a") as file:
            file.write(json.dumps(payload) + "\n")
        count = min(MOST, payload["max_tokens"])
        events = [{"choices": [{"text": "x"}]}] * count + [{"choices": [], "usage": {"completion_tokens": count}}]
        self.answer("".join(f"data: {json.dumps(event)}\n\n" for event in events).encode() + b"data: [DONE]\n\n")

    def answer(self, body):
        self.send_response(200)
        self.end_headers()
        # In pieces with different arrival times.
        for line in body.splitlines(keepends=True):
            self.wfile.write(line)
            self.wfile.flush()
            time.sleep(0.001)

    def log_message(self, *words):
        pass


ThreadingHTTPServer(("127.0.0.1", PORT), Handler).serve_forever()
