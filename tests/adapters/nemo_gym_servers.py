"""Run a resources server and an agent server of NeMo Gym, unmodified. It runs where NeMo Gym is installed.

    python nemo_gym_servers.py PORT OF THE MODEL

It prints the addresses of both as JSON, and serves until its standard input ends. NeMo Gym's own launcher would make an
environment and a process for each server, and start Ray.
"""

import asyncio
import json
import os
import socket
import sys

import uvicorn
from nemo_gym.config_types import BaseServerConfig
from nemo_gym.server_utils import GlobalAIOHTTPAsyncClientConfig, ServerClient, set_global_aiohttp_client
from omegaconf import OmegaConf
from resources_servers.example_session_state_mgmt.app import (
    StatefulCounterResourcesServer,
    StatefulCounterResourcesServerConfig,
)
from responses_api_agents.simple_agent.app import SimpleAgent, SimpleAgentConfig

HOST = "127.0.0.1"


def listening() -> socket.socket:
    """Return a socket at a free port."""
    one = socket.socket()
    one.bind((HOST, 0))
    return one


async def main(model_port: int) -> None:
    set_global_aiohttp_client(GlobalAIOHTTPAsyncClientConfig())
    sockets = {"counter": listening(), "simple_agent": listening()}
    ports = {"policy_model": model_port, **{name: one.getsockname()[1] for name, one in sockets.items()}}
    known = OmegaConf.create({name: {"kind": {"app": {"host": HOST, "port": port}}} for name, port in ports.items()})
    client = ServerClient(head_server_config=BaseServerConfig(host=HOST, port=1), global_config_dict=known)

    def config(kind, name, **more):
        return kind(host=HOST, port=ports[name], entrypoint="app.py", name=name, **more)

    counter = config(StatefulCounterResourcesServerConfig, "counter")
    agent = config(
        SimpleAgentConfig, "simple_agent", max_steps=8,
        resources_server={"type": "resources_servers", "name": "counter"},
        model_server={"type": "responses_api_models", "name": "policy_model"},
    )  # fmt: skip
    servers = {
        "counter": StatefulCounterResourcesServer(config=counter, server_client=client),
        "simple_agent": SimpleAgent(config=agent, server_client=client),
    }
    running = []
    for name, server in servers.items():
        app = server.setup_webserver()
        server.setup_exception_middleware(app)
        served = uvicorn.Server(uvicorn.Config(app, log_level="warning", timeout_keep_alive=30))
        running.append(asyncio.create_task(served.serve(sockets=[sockets[name]])))
        while not served.started:
            await asyncio.sleep(0.01)
    print(json.dumps({name: f"http://{HOST}:{ports[name]}" for name in servers}), flush=True)
    await asyncio.to_thread(sys.stdin.read)
    os._exit(0)  # an agent whose episode was given up asks for ever for the model, and its server would wait for it


asyncio.run(main(int(sys.argv[1])))
