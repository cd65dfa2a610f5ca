"""A server of the Model Context Protocol over HTTP, by hand, whose tools are good or bad. It prints its port."""

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

TOOLS = ("echo", "hang", "garbage", "fail", "endless", "drop")
starts = 0


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *words):
        pass

    def answer(self, body, code=200, kind="application/json"):
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(code)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self):
        self.answer(b"", 405)

    def do_DELETE(self):
        self.do_GET()

    def do_POST(self):
        global starts
        message = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        number, method = message.get("id"), message["method"]
        if number is None:
            self.answer(b"", 202)
            return
        result = {}
        if method == "initialize":
            starts += 1
            info = {"name": "by hand", "version": "1"}
            version = message["params"]["protocolVersion"]
            result = {"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": info}
        elif method == "tools/list":
            result = {"tools": [{"name": name, "inputSchema": {"type": "object"}} for name in TOOLS]}
        elif method == "tools/call":
            name = message["params"]["name"]
            if name == "hang":
                time.sleep(600)
            if name == "garbage":
                self.answer(b"<html>no JSON</html>")
                return
            if name == "fail":
                self.answer(b"a traceback", 500, "text/plain")
                return
            if name == "drop":
                self.connection.close()
                return
            if name == "endless":
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Transfer-Encoding", "chunked")
                self.end_headers()
                while True:
                    self.wfile.write(b"100000\r\n" + b" " * (1 << 20) + b"\r\n")
            result = {"content": [{"type": "text", "text": f"start {starts}"}], "isError": False}
        self.answer({"jsonrpc": "2.0", "id": number, "result": result})


server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
server.daemon_threads = True
threading.Thread(target=server.serve_forever, daemon=True).start()
print(server.server_port, flush=True)
time.sleep(3600)
