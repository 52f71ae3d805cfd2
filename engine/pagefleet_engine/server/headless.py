"""`pagefleet serve --headless`: one of an engine's machines, without a server of its own but for probes.

SIGTERM  -> goes on until the leader has ended, which gets one too and drains, at most `drain_timeout` -> exit 0
again    -> exit 0 at once
leader or rank gone -> exit 1
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from dataclasses import replace
from pathlib import Path

import uvloop
from pagefleet_protocol.errors import Fault, shape_of
from pagefleet_protocol.load_progress import LoadProgress
from pagefleet_protocol.settings.log import set_up_logging
from starlette.types import Receive, Scope, Send

from pagefleet_engine.client.data_ranks import rank_configs
from pagefleet_engine.config import EngineConfig, ServerConfig
from pagefleet_engine.engine_core.model_folder import resolve_model_folder
from pagefleet_engine.errors import ConfigError, EngineDead
from pagefleet_engine.executor.vital_signs import least_progress
from pagefleet_engine.local_model import bring_local_model, without_token
from pagefleet_engine.nodes.agreement import commit_of
from pagefleet_engine.nodes.follower import LeaderAddress
from pagefleet_engine.nodes.followers import Followers
from pagefleet_engine.nodes.leader import read_key
from pagefleet_engine.server.lifecycle import FrontDoor, Listener, StopSignals, bind, first_of
from pagefleet_engine.server.loading import READINESS, Loading, LoadingApp, telling
from pagefleet_engine.server.profile import made_profiler_dir
from pagefleet_engine.server.responses import json_response

logger = logging.getLogger(__name__)


def serve_headless(config: EngineConfig, server: ServerConfig) -> int:
    """Run this machine's ranks until the leader ends.

    Returns:
        Exit status: 0 after a signal, 1 when the leader or a rank ended.

    Raises:
        ConfigError: a setting cannot work, the leader refuses this machine, or the model cannot be loaded.
    """
    set_up_logging(f"node {config.parallel.node_rank}", "pagefleet_download", "pagefleet_engine", "pagefleet_kv")
    made_profiler_dir(server.profiler_dir)
    assert config.parallel.master_addr is not None
    leader = LeaderAddress(config.parallel.master_addr, config.parallel.master_port, read_key(server.fleet_key_file))
    listener = bind(server.host, server.port)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_serve(config, server, leader, listener))


async def _serve(config: EngineConfig, server: ServerConfig, leader: LeaderAddress, listener: Listener) -> int:
    loading, commit = Loading(), LeadersCommit()
    follower = Followers(rank_configs(without_token(config)), leader, commit.told)
    app = _Probes(follower, LoadingApp(loading.progress), config.parallel.node_rank)
    with StopSignals() as signals, listener:
        async with FrontDoor(listener.sock, app), telling(loading):
            following = asyncio.create_task(asyncio.to_thread(follower.run))
            bringing = asyncio.create_task(bring_model(config, follower, loading, commit))
            try:
                await first_of(following, signals.first)
                if not following.done():
                    await _leave(follower, following, signals, server.drain_timeout)
                await following
            except EngineDead as error:
                if signals.first.is_set():
                    return 0
                logger.error("EngineDead: %s", error)
                return 1
            finally:
                bringing.cancel()
                await asyncio.wait({bringing})
            return 0


async def _leave(follower: Followers, following: asyncio.Task[None], signals: StopSignals, within_s: float) -> None:
    if follower.is_joined:
        logger.info("stopping: waiting up to %.0f s for the leader to end", within_s)
        await first_of(following, signals.second, timeout_s=within_s)
    if not following.done():
        follower.stop()


class LeadersCommit:
    """Which commit of the model the leader has, as soon as it has told; made in the event loop that waits for it."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._told: asyncio.Future[str | None] = self._loop.create_future()

    def told(self, commit: str | None) -> None:
        """Take it, from any thread; after a new connection once more."""
        self._loop.call_soon_threadsafe(self._settle, commit)

    def _settle(self, commit: str | None) -> None:
        if not self._told.done():
            self._told.set_result(commit)

    async def wait(self) -> str | None:
        """Return it; None: the leader's model is not from the hub."""
        return await asyncio.shield(self._told)


async def bring_model(config: EngineConfig, follower: Followers, loading: Loading, leaders: LeadersCommit) -> None:
    """Have the model here, at the leader's commit: a branch may have moved since one of both was downloaded."""
    try:
        folder = await _folder_of(config, loading)
        commit = await leaders.wait()
        if commit is not None and commit_of(folder) not in (None, commit):
            logger.info("%s means commit %s here, and %s at the leader", config.model.model, folder.name, commit)
            folder = await _folder_of(replace(config, model=replace(config.model, revision=commit)), loading)
        began = time.monotonic()
        loading.follow(lambda: [_progress(follower, time.monotonic() - began)])
        follower.bring(folder)
    except ConfigError as error:
        follower.give_up(error)


async def _folder_of(config: EngineConfig, loading: Loading) -> Path:
    local = await bring_local_model(config, os.environ, loading.download)
    return resolve_model_folder(local.model.model)


def _progress(follower: Followers, seconds: float) -> LoadProgress:
    ranks = follower.progress()
    return LoadProgress(*least_progress(ranks), seconds) if ranks else LoadProgress(seconds=seconds)


class _Probes:
    """ASGI: what kubelets ask; for all else there is node 0."""

    def __init__(self, follower: Followers, until_ready: LoadingApp, node: int) -> None:
        self._follower = follower
        self._until_ready = until_ready
        self._node = node

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"]
        if path == "/livez" or (path in READINESS and not self._follower.is_ready):
            await self._until_ready(scope, receive, send)
        elif path in READINESS:
            await json_response(b'{"status":"ready"}')(scope, receive, send)
        else:
            fault = Fault(404, f"This is node {self._node} of an engine: ask node 0, which has the server.")
            await json_response(fault.body(shape_of(path)), 404)(scope, receive, send)
