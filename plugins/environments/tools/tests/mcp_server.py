"""A server of the Model Context Protocol, by hand: good tools, and every way to be a bad server.

python mcp_server.py [FAULT]      over stdin and stdout; with a fault it fails at its start
"""

import json
import os
import sys
import time

TOOLS = {
    "echo": "Return a text.", "number": "Return the number of this process.", "count": "Count calls.",
    "wrong": "Say that the call is wrong.", "refuse": "Refuse the call by an error of the protocol.",
    "picture": "Return a picture.", "sleep": "Sleep.", "freeze": "Stop answering anything.", "crash": "End it.",
    "eat": "Fill memory.", "babble": "Write what is no JSON.", "stranger": "Answer another call.",
    "shapeless": "Answer without the fields of an answer.", "endless": "Write a line without end.",
    "chatter": "Write notifications for ever.", "flood": "Write much to stderr, and answer.", "long": "Return much.",
}  # fmt: skip
calls = 0


def say(message):
    sys.stdout.write(json.dumps({"jsonrpc": "2.0", **message}) + "\n")
    sys.stdout.flush()


def texts(*parts, error=False):
    return {"content": [{"type": "text", "text": part} for part in parts], "isError": error}


def call(number, name, arguments):
    global calls
    calls += 1
    good = {
        "echo": lambda: texts(arguments["text"]),
        "number": lambda: texts(str(os.getpid())),
        "count": lambda: texts(str(calls)),
        "wrong": lambda: texts("no such city", error=True),
        "picture": lambda: {"content": [{"type": "image", "data": "aGk=", "mimeType": "image/png"}], "isError": False},
        "long": lambda: texts("z" * (3 << 20)),
    }
    if name in good:
        say({"id": number, "result": good[name]()})
    elif name == "refuse":
        say({"id": number, "error": {"code": arguments.get("code", -32602), "message": "unknown parameter"}})
    elif name == "sleep":
        time.sleep(arguments["seconds"])
        say({"id": number, "result": texts("slept")})
    elif name == "freeze":
        time.sleep(600)
    elif name == "crash":
        os._exit(3)
    elif name == "eat":
        held = [bytearray(1 << 24) for _ in range(1 << 12)]
        say({"id": number, "result": texts(str(len(held)))})
    elif name == "babble":
        sys.stdout.write("this is no JSON\n{\n[]\n" * 10)
        sys.stdout.flush()
    elif name == "stranger":
        say({"id": 424242, "result": texts("for nobody")})
    elif name == "shapeless":
        say({"id": number, "result": {"content": "what content is not", "isError": "perhaps"}})
    elif name == "endless":
        while True:
            sys.stdout.write("x" * (1 << 20))
    elif name == "chatter":
        while True:
            say({"method": "notifications/message", "params": {"level": "info", "data": "x" * 100}})
            time.sleep(0.001)
    elif name == "flood":
        for _ in range(64):
            sys.stderr.write("x" * (1 << 16))
        sys.stderr.flush()
        say({"id": number, "result": texts("flooded")})


def main():
    fault = sys.argv[1] if len(sys.argv) > 1 else ""
    if fault == "die":
        sys.exit("a server that does not like to start")
    if fault == "hang":
        time.sleep(600)
    for line in sys.stdin:
        message = json.loads(line)
        number, method = message.get("id"), message["method"]
        if method == "initialize":
            version = "a lie" if fault == "version" else message["params"]["protocolVersion"]
            info = {"name": "by hand", "version": "1"}
            say(
                {
                    "id": number,
                    "result": {"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": info},
                }
            )
        elif method == "tools/list":
            schema = {"type": "object", "properties": {"text": {"type": "string"}, "seconds": {"type": "number"}}}
            tools = [{"name": name, "description": words, "inputSchema": schema} for name, words in TOOLS.items()]
            if fault == "names":
                tools = [{"name": "../../etc", "inputSchema": schema}]
            if fault == "shapeless":
                tools = [{"title": "no name"}]
            pages = {"nextCursor": "more"} if fault == "pages" else {}
            say({"id": number, "result": {"tools": tools, **pages}})
        elif method == "tools/call":
            call(number, message["params"]["name"], message["params"].get("arguments") or {})
        elif method == "ping":
            say({"id": number, "result": {}})
        elif number is not None:
            say({"id": number, "error": {"code": -32601, "message": f"no method {method}"}})


main()
